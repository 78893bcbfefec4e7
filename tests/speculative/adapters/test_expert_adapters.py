"""LoRA adapters of routed experts: greedy tokens of peft's merged models, in float32."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from aerie.cluster.replica import plan_report
from aerie.kernels.experts.adapted.product import ExpertLoraTables
from aerie.speculative.build import check_weights, local_engine, plan_engine, plan_weights
from aerie.workers.config import GraphCapture, LoraConfig
from aerie.workers.distributed.tp_group import SOLO, TPGroup
from aerie.workers.layers.moe import Experts
from aerie.workers.lora.adapter_file import AdapterNames, read_layers
from aerie.workers.lora.expert_file import ExpertNames
from aerie.workers.lora.experts import AdaptedExperts, allocate_expert_tables, experts_of
from aerie.workers.lora.layers import AdapterRows
from aerie.workers.lora.matrices import LayerMatrices
from aerie.workers.models.loading import allocate_target, weight_names
from aerie.workers.models.name_map import NameMap
from aerie.workers.runner.graphs.cuda_graph import GraphedDecoding
from aerie.workers.runner.worker import Worker
from tests.speculative.adapters.conftest import GREEDY, Adapted, of
from tests.speculative.adapters.test_adapter_files import spec_of
from tests.speculative.adapters.test_adapters import speculation, tokens
from tests.speculative.conftest import EOS, Pair
from tests.speculative.test_graphs_while_serving import TOKENS
from tests.support.int_checkpoints import pack_quantized, quantise
from tests.support.kernels.eager_graphs import LazyRecorder
from tests.support.slow import slow
from tests.support.targets.adapters import make_adapter, merged_tokens
from tests.support.tiny_models import VOCAB, make_eagle, make_target

GATES, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
NUM_EXPERTS, WIDTH, HIDDEN = 6, 48, 64  # of a tiny Qwen3 with experts
FORMS: dict[str, dict[str, Any]] = {
    "parameters": {"target_modules": ["q_proj"], "target_parameters": [GATES, DOWN]},
    "modules": {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},  # peft joins gates: twice the rank
    "down": {"r": 3, "use_rslora": True, "target_modules": [], "target_parameters": [DOWN]},
    "gates": {"r": 12, "alpha_pattern": {GATES: 30}, "target_modules": ["o_proj"], "target_parameters": [GATES]},
}
quiet_peft = pytest.mark.filterwarnings("ignore:The following .* keys did not match")  # of its own conversion


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def by_expert(folder: Path, adapter: Path) -> Path:
    """An adapter that peft made of "modules", as older models have it: a module for each matrix of each expert."""
    copy, tensors = Path(shutil.copytree(adapter, folder)), dict[str, Tensor]()
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        layer, is_expert, rest = name.partition(".mlp.experts.")
        if not is_expert:
            tensors[name] = tensor
            continue
        parts, side = (("gate_proj", "up_proj") if "base_layer" in rest else ("down_proj",)), rest.split(".")[-2]
        rows = tensor if side == "lora_A" else tensor.view(-1, tensor.shape[1] // NUM_EXPERTS, NUM_EXPERTS)
        for expert in range(NUM_EXPERTS):
            own = rows.chunk(NUM_EXPERTS)[expert] if side == "lora_A" else rows[..., expert]
            for i, part in enumerate(parts):
                matrix = own.chunk(len(parts))[i]
                if side == "lora_B" and len(parts) == 2:
                    matrix = matrix.chunk(2, 1)[i]
                tensors[f"{layer}.mlp.experts.{expert}.{part}.{side}.weight"] = matrix.contiguous()
    save_file(tensors, copy / "adapter_model.safetensors")
    config = json.loads((copy / "adapter_config.json").read_text())
    config |= {"rank_pattern": {}, "alpha_pattern": {}, "target_parameters": None, **FORMS["modules"]}
    (copy / "adapter_config.json").write_text(json.dumps(config))
    return copy


def zero_other_blocks(adapter: Path) -> Path:
    """Let a random adapter of "modules" be one that peft could have converted: gates use the first half of ranks."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("experts.base_layer.lora_B.weight"):
            blocks = tensor.view(2, WIDTH, 2, -1)
            blocks[0, :, 1] = blocks[1, :, 0] = 0.0
    save_file(tensors, adapter / "adapter_model.safetensors")
    return adapter


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    """A tiny Qwen3 with experts, its EAGLE head, and an adapter of each form."""
    folder = tmp_path_factory.mktemp("experts")
    target = make_target(folder / "target", calm=0.01, architecture="Qwen3Moe", num_hidden_layers=2)
    eagle = make_eagle(folder / "eagle", target, copying=True)
    pair = Pair(target, eagle, eagle, prompts_of(37, 5, 22))
    made = {
        name: make_adapter(folder / name, target, seed, **settings)
        for seed, (name, settings) in enumerate(FORMS.items())
    }
    zero_other_blocks(made["modules"])
    expected = {
        name: merged_tokens(target, path, pair.prompts, GREEDY.max_tokens, EOS)
        for name, path in {"": None, **made}.items()
    }
    assert len({str(found) for found in expected.values()}) == len(expected), "each adapter changes the text"
    made["by expert"], expected["by expert"] = by_expert(folder / "single", made["modules"]), expected["modules"]
    return Adapted(pair, {name: str(path) for name, path in made.items()}, expected)


pytestmark = quiet_peft


def lora_of(experts: Adapted) -> LoraConfig:
    return LoraConfig(experts.adapters, 5, 16, experts=True)


@pytest.mark.parametrize(
    ("method", "ranks", "whole"),
    [("tree", 1, False), *slow(("none", 1, False), ("none", 2, False), ("chain", 2, True), ("tree", 2, False))],
)
def test_requests_with_different_adapters_share_steps(experts: Adapted, method: str, ranks: int, whole: bool) -> None:
    """Prompts in chunks; pages for few requests. whole: each rank has some whole experts."""
    spec = experts.spec(speculation(experts.pair, method), lora_of(experts), ranks, pages=30)
    spec = dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, expert_parallel=whole))
    with local_engine(spec) as engine:
        assert tokens(engine, experts, ["", *experts.adapters]) == experts.expected
        assert engine.scheduler.stats.num_preemptions > 0


def test_captured_steps_serve_all_adapters(experts: Adapted) -> None:
    with local_engine(experts.spec(speculation(experts.pair, "tree"), lora_of(experts))) as engine:
        worker, recorder = engine.executor, LazyRecorder()
        assert isinstance(worker, Worker)
        slots, buckets = worker._slots, (1, 2, 4, 6)
        graphs = GraphedDecoding(worker._strategy, slots, buckets, 256, recorder, TOKENS, has_row_index=True)  # type: ignore[arg-type]
        with torch.inference_mode():
            graphs.capture(GraphCapture(limit_s=1e9), SOLO)
        worker._strategy = graphs
        names = ["", "gates", "parameters"]
        assert tokens(engine, experts, names) == {name: experts.expected[name] for name in names}
        assert recorder.num_replays > 0


@pytest.mark.parametrize(
    ("architecture", "ranks", "whole"),
    [
        ("GptOss", 2, False),
        ("Mixtral", 1, False),
        *slow(
            ("Mixtral", 2, False),
            ("GptOss", 1, False),
            ("GptOss", 2, True),
            ("GraniteMoe", 2, False),
            ("DeepseekV3", 1, False),
            ("Glm4Moe", 2, True),
        ),
    ],
)
def test_families_stack_experts_in_their_own_ways(tmp_path: Path, architecture: str, ranks: int, whole: bool) -> None:
    """gpt-oss: inputs first, rows of gate and up interleaved, biases, another activation. DeepSeek and GLM: beside
    shared experts and dense layers. Mixtral: experts that the adapter of transformers' modules recognises."""
    target = make_target(tmp_path / "target", architecture=architecture, num_hidden_layers=2)
    settings: dict[str, Any] = {"target_modules": ["gate_proj", "up_proj", "down_proj"]}
    if architecture in ("GptOss", "GraniteMoe", "Mixtral"):
        settings = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    adapter, prompts = make_adapter(tmp_path / "adapter", target, 3, **settings), prompts_of(37, 5)
    expected = merged_tokens(target, adapter, prompts, GREEDY.max_tokens, EOS)
    assert expected != merged_tokens(target, None, prompts, GREEDY.max_tokens, EOS)
    lora = LoraConfig({"a": str(adapter)}, experts=True)
    with local_engine(spec_of(target, lora, tensor_parallel=ranks, expert_parallel=whole)) as engine:
        assert [request.output for request in engine.generate(prompts, of("a"))] == expected


def test_mixtrals_matrices_have_names_of_their_own(tmp_path: Path) -> None:
    """w1, w2 and w3 of block_sparse_moe, as adapters of 2024 have them."""
    target, merged = (make_target(tmp_path / name, architecture="Mixtral", num_hidden_layers=1) for name in "tm")
    weights, adapter = load_file(target / "model.safetensors"), tmp_path / "adapter"
    generator, tensors = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for name, weight in weights.items():
        if ".experts." in name:
            module, (outputs, inputs) = name.removesuffix(".weight"), weight.shape
            down = torch.randn(8, inputs, generator=generator) * inputs**-0.5
            up = torch.randn(outputs, 8, generator=generator) * 0.2
            tensors |= {f"base_model.model.{module}.lora_{side}.weight": of for side, of in (("A", down), ("B", up))}
            weights[name] = weight + (2 * up @ down).to(weight.dtype)
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["w1", "w2", "w3"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    expected = merged_tokens(merged, None, prompts := prompts_of(37, 5), GREEDY.max_tokens, EOS)
    assert expected != merged_tokens(target, None, prompts, GREEDY.max_tokens, EOS)
    with local_engine(spec_of(target, LoraConfig({"a": str(adapter)}, experts=True))) as engine:
        assert [request.output for request in engine.generate(prompts, of("a"))] == expected


def packed_target(folder: Path, source: Path) -> Path:
    """int4 in groups of 32, with the weights that it means in the folder `plain`."""
    return quantise(source, folder, pack_quantized())


def test_experts_of_few_bits_take_adapters(tmp_path: Path) -> None:
    """Tokens are those of peft's merge of the dequantised checkpoint."""
    source = make_target(tmp_path / "s", architecture="Qwen3Moe", num_hidden_layers=2, moe_intermediate_size=128)
    adapter = make_adapter(tmp_path / "adapter", source, 5, **FORMS["parameters"])
    target, prompts = packed_target(tmp_path / "packed", source), prompts_of(37, 5)
    expected = merged_tokens(target / "plain", adapter, prompts, GREEDY.max_tokens, EOS)
    assert expected != merged_tokens(target / "plain", None, prompts, GREEDY.max_tokens, EOS)
    lora = LoraConfig({"a": str(adapter)}, experts=True)
    with local_engine(spec_of(target, lora, tensor_parallel=2)) as engine:
        assert [request.output for request in engine.generate(prompts, of("a"))] == expected


def test_experts_of_few_bits_and_an_odd_width_are_refused(tmp_path: Path) -> None:
    source = make_target(tmp_path / "s", architecture="Qwen3Moe", num_hidden_layers=2, moe_intermediate_size=96)
    spec = spec_of(packed_target(tmp_path / "packed", source), LoraConfig(experts=True))
    with pytest.raises(ValueError, match=r"lora\.experts: .* take adapters if 64 and the groups .* is 96; change"):
        check_weights(spec, plan_engine(spec))


def refusal(experts: Adapted, lora: LoraConfig) -> str:
    spec = experts.spec(lora=lora)
    with pytest.raises(ValueError) as error:
        check_weights(spec, plan_engine(spec))
    return str(error.value)


@pytest.mark.parametrize("name", ["parameters", "by expert"])
def test_experts_must_be_asked_for(experts: Adapted, name: str) -> None:
    text = refusal(experts, LoraConfig({"odd": experts.adapters[name]}))
    assert text.startswith("lora.modules.odd: ")
    assert "is of routed experts, which adapters change only with lora.experts: true (docs/lora.md)" in text


def test_models_without_experts_refuse_the_option(tmp_path: Path) -> None:
    spec = spec_of(make_target(tmp_path, num_hidden_layers=2), LoraConfig(experts=True))
    with pytest.raises(ValueError, match=r"lora\.experts: .* has no routed experts; leave it out"):
        check_weights(spec, plan_engine(spec))


def test_tables_of_experts_are_counted(experts: Adapted) -> None:
    """Ranks share the width of experts: the inputs of gate and up, and the outputs of down, are whole on each."""
    with_experts, without = (
        experts.spec(lora=LoraConfig(max_loras=3, max_lora_rank=20, experts=asked), ranks=2) for asked in (True, False)
    )
    sizes, plain = (plan_weights(spec, plan_engine(spec), False) for spec in (with_experts, without))
    expected = 2 * 3 * NUM_EXPERTS * 32 * (2 * HIDDEN + 2 * WIDTH // 2 + WIDTH // 2 + HIDDEN) * 4
    assert sizes.expert_adapters == expected and sizes.adapters - plain.adapters == expected
    assert plain.expert_adapters == 0


def test_the_plan_prints_the_bytes_of_experts(experts: Adapted) -> None:
    spec = experts.spec(lora=LoraConfig(max_loras=1000, max_lora_rank=256, experts=True))
    engine = plan_engine(spec)
    weights = plan_weights(spec, engine, False)
    (line,) = plan_report._adapter_lines(engine.layout, weights)
    total, of_experts = (f"{size / 1e9:.2f} GB" for size in (weights.adapters, weights.expert_adapters))
    assert f"{total} of each GPU ({of_experts} of them for routed experts)" in line and of_experts != "0.00 GB"


def test_a_pass_with_adapters_uses_no_fused_kernels() -> None:
    """Nor may a norm before the experts choose them, or give rows in FP8."""
    group = TPGroup(0, 1)
    inner: Any = Experts(4, 64, 32, group, 2).method
    inner._fused = SimpleNamespace(inputs="FP8")
    rows, meta = AdapterRows(torch.zeros(3, dtype=torch.int64)), torch.device("meta")
    tables = ExpertLoraTables(torch.empty(1, 4, 32, 64, device=meta), torch.empty(1, 4, 64, 16, device=meta), (0, 64))
    method = AdaptedExperts(inner, tables, tables, rows)
    assert method.is_fused and str(method.fp8_inputs) == "FP8"
    with rows.without_adapters(1):
        assert not method.is_fused and method.fp8_inputs is None
    assert method.is_fused


BASE = "base_model.model.model.layers.1.mlp.experts"
CASES: dict[str, tuple[dict[str, Tensor], str]] = {
    "experts": (
        {f"{BASE}.lora_A.weight": torch.ones(20, WIDTH), f"{BASE}.lora_B.weight": torch.ones(HIDDEN, 20)},
        r"layers\.1\.mlp\.experts \(lora_A\) has shape \(20, 48\), adapter_config.json implies rank 24",
    ),
    "shape": (
        {f"{BASE}.lora_A.weight": torch.ones(24, WIDTH), f"{BASE}.lora_B.weight": torch.ones(65, 24)},
        r"do not fit experts of 64 inputs and a width of 48",
    ),
    "nan": (
        {f"{BASE}.lora_A.weight": torch.ones(24, WIDTH), f"{BASE}.lora_B.weight": torch.full((HIDDEN, 24), torch.nan)},
        r"\(lora_B\) has weights that are NaN",
    ),
    "expert's shape": (
        {f"{BASE}.5.up_proj.lora_A.weight": torch.ones(4, 65), f"{BASE}.5.up_proj.lora_B.weight": torch.ones(WIDTH, 4)},
        r"experts\.5\.up_proj \(lora_A\) has shape \(4, 65\), the expert has 64 inputs",
    ),
    "no expert": (
        {f"{BASE}.6.up_proj.lora_A.weight": torch.ones(4, 64), f"{BASE}.6.up_proj.lora_B.weight": torch.ones(WIDTH, 4)},
        r"experts\.6\.up_proj is of a layer that adapters cannot change here",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_matrices_that_do_not_fit_are_refused_by_name(experts: Adapted, tmp_path: Path, case: str) -> None:
    tensors, message = CASES[case]
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "peft_version": "0.21.2"}))
    assert re.search(message, refusal(experts, LoraConfig({"odd": str(tmp_path)}, experts=True)))


def read(folder: Path, model: nn.Module, names: NameMap) -> dict[str, LayerMatrices]:
    layers = experts_of(model)
    found = AdapterNames({}, names, ExpertNames(layers, names, True))
    return read_layers(folder, found, {}, allocate_expert_tables(layers, 1, 16, torch.device("meta")), 16)


@pytest.mark.parametrize(
    ("architecture", "version", "turned"),
    [
        ("Qwen3Moe", "0.17.0", True),
        ("Qwen3Moe", "0.19.0", True),
        ("Qwen3Moe", "0.19.1", False),
        ("GptOss", "0.18.1", False),
        ("GptOss", "0.19.0", True),
    ],
)
def test_forms_of_former_versions_of_peft_are_told_apart(
    tmp_path: Path, architecture: str, version: str, turned: bool
) -> None:
    """Before 0.19.1 peft took the outputs of most families for inputs, and 0.19.0 those of gpt-oss. Matrices of as many
    inputs as outputs do not show it."""
    width = {"moe_intermediate_size": 32} if architecture == "Qwen3Moe" else {"intermediate_size": 64}
    target = make_target(tmp_path / "target", architecture=architecture, num_hidden_layers=2, **width)
    engine = plan_engine(spec_of(target, LoraConfig()))
    model = allocate_target(engine.target, SOLO, torch.device("meta"), 1, (), torch.float32, "model")
    names = weight_names(engine.target, "model")
    adapter = make_adapter(tmp_path / "adapter", target, 3, target_modules=[], target_parameters=[GATES, DOWN])
    expected = read(adapter, model, names)
    tensors = dict[str, Tensor]()
    for name, down in load_file(adapter / "adapter_model.safetensors").items():
        if ".lora_A." in name:
            up_name = name.replace(".lora_A.", ".lora_B.")
            up = load_file(adapter / "adapter_model.safetensors")[up_name]
            if turned:  # the same products, with A and B swapped
                by_expert_up = up.view(up.shape[0], -1, NUM_EXPERTS).permute(2, 1, 0)
                by_expert_down = down.view(NUM_EXPERTS, -1, down.shape[1]).permute(2, 1, 0)
                down, up = by_expert_up.reshape(-1, up.shape[0]), by_expert_down.reshape(down.shape[1], -1)
            tensors |= {name: down.contiguous(), up_name: up.contiguous()}
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text()) | {"peft_version": version}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    found = read(adapter, model, names)
    assert found.keys() == expected.keys() and len(found) == 4
    for path, matrices in found.items():
        assert matrices.down.equal(expected[path].down) and matrices.up.equal(expected[path].up)
