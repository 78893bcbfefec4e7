"""Adapters' folders: families and names that are read, and what is refused, by name."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from torch import Tensor

from aerie.attention.config import CacheConfig
from aerie.speculative.build import EngineSpec, check_weights, local_engine, plan_engine, plan_weights
from aerie.workers.config import LoraConfig, ModelSource, SchedulerConfig, WorkerConfig
from aerie.workers.lora.adapter_config import read_adapter_config
from aerie.workers.models.gguf.folder import checkpoint_folder
from tests.speculative.adapters.conftest import GREEDY, Adapted, of
from tests.speculative.conftest import EOS
from tests.support.int_checkpoints import Recipe, awq, gptq, int_quantized, pack_quantized, quantise
from tests.support.known_models import make_known
from tests.support.slow import slow
from tests.support.targets.adapters import make_adapter, merged_tokens
from tests.support.targets.gguf_files import write_gguf
from tests.support.tiny_models import VOCAB, make_target
from tests.workers.layers.test_block_fp8 import quantised as blocks_of_fp8
from tests.workers.quantization.test_tensor_fp8 import quantised as tensors_of_fp8

Q = "base_model.model.model.layers.1.self_attn.q_proj"


def spec_of(target: Path, lora: LoraConfig, **settings: Any) -> EngineSpec:
    worker = WorkerConfig(
        ModelSource(path=str(target), device="cpu"),
        CacheConfig(page_size=4, num_pages=120, state_snapshots=16),
        SchedulerConfig(4, 24),
        measure_costs=False,
        debug=True,
        lora=lora,
    )
    return EngineSpec(dataclasses.replace(worker, **settings))


@pytest.mark.parametrize(
    ("architecture", "ranks", "settings"),
    [
        ("Qwen2", 2, {}),  # biases
        ("Qwen3", 1, {}),  # norms of q and k
        ("Phi3", 2, {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}),  # stacked in checkpoints
        *slow(
            ("Gemma2", 1, {}),  # another activation
            ("Gemma3", 1, {}),
            ("Olmo2", 1, {}),
            ("Qwen3Moe", 1, {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}),
            ("Granite", 2, {}),
        ),
    ],
)
def test_families_give_the_tokens_of_merged_models(
    tmp_path: Path, architecture: str, ranks: int, settings: dict[str, Any]
) -> None:
    target = make_target(tmp_path / "target", architecture=architecture)
    adapter = make_adapter(tmp_path / "adapter", target, 3, **settings)
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (37, 5, 22)]
    expected = {
        name: merged_tokens(target, path, prompts, GREEDY.max_tokens, EOS)
        for name, path in (("", None), ("a", adapter))
    }
    assert expected[""] != expected["a"]
    with local_engine(spec_of(target, LoraConfig({"a": str(adapter)}), tensor_parallel=ranks)) as engine:
        for names in (("", "", ""), ("a", "a", "a"), ("", "a", "")):
            requests = engine.generate(prompts, [of(name) for name in names])
            assert [r.output for r in requests] == [expected[name][i] for i, name in enumerate(names)]


def fp8_blocks(source: Path, folder: Path) -> tuple[Path, Path]:
    return (packed := blocks_of_fp8(source, folder)), packed / "plain"


def fp8_channels(source: Path, folder: Path) -> tuple[Path, Path]:
    return (packed := tensors_of_fp8(source, folder, "channel")), packed / "plain"


def q8_0(source: Path, folder: Path) -> tuple[Path, Path]:
    """A GGUF file, whose rows of q and k are in another order."""
    folder.mkdir()
    file = write_gguf(source, folder / "model.gguf", lambda name, _: Type.Q4_0 if "down" in name else Type.Q8_0)
    return checkpoint_folder(file, folder / "cache"), folder / "means"


def few_bits(recipe: Recipe) -> Callable[[Path, Path], tuple[Path, Path]]:
    def write(source: Path, folder: Path) -> tuple[Path, Path]:
        return (packed := quantise(source, folder, recipe)), packed / "plain"

    return write


PACKED = {
    "awq": few_bits(awq()),
    "gptq": few_bits(gptq(desc_act=True)),
    "pack": few_bits(pack_quantized()),
    "int8": few_bits(int_quantized()),
    "fp8-blocks": fp8_blocks,
    "fp8-channels": fp8_channels,
    "gguf": q8_0,
}


@pytest.mark.parametrize("packed", ["awq", "fp8-blocks", "gguf", *slow("gptq", "pack", "int8", "fp8-channels")])
def test_packed_weights_take_adapters(tmp_path: Path, packed: str) -> None:
    """The adapter's part is added to the product with the packed weight. Tokens are those of peft's merge of the
    dequantised checkpoint."""
    source = make_target(tmp_path / "source", num_hidden_layers=2)
    adapter = make_adapter(tmp_path / "adapter", source, 5)
    folder, plain = PACKED[packed](source, tmp_path / "packed")
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (3, 41, 18)]
    expected = merged_tokens(plain, adapter, prompts, GREEDY.max_tokens, EOS)
    assert expected != merged_tokens(plain, None, prompts, GREEDY.max_tokens, EOS)
    with local_engine(spec_of(folder, LoraConfig({"a": str(adapter)}), tensor_parallel=2)) as engine:
        assert [request.output for request in engine.generate(prompts, of("a"))] == expected


def changed(adapted: Adapted, folder: Path, change: Callable[[dict[str, Tensor]], None], **config: Any) -> str:
    """A copy of an adapter with other tensors and fields."""
    copy = shutil.copytree(adapted.adapters["small"], folder)
    tensors = load_file(copy / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, copy / "adapter_model.safetensors")
    fields = json.loads((copy / "adapter_config.json").read_text()) | config
    (copy / "adapter_config.json").write_text(json.dumps(fields))
    return str(copy)


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: tensor})


CASES: dict[str, tuple[Callable[[dict[str, Tensor]], None], dict[str, Any], str]] = {
    "inputs": (put(f"{Q}.lora_A.weight", torch.ones(4, 63)), {}, r"layers.1.self_attn.q_proj \(lora_A\) has shape"),
    "outputs": (put(f"{Q}.lora_B.weight", torch.ones(65, 4)), {}, "the layer has 64 outputs"),
    "rank": (put(f"{Q}.lora_A.weight", torch.ones(5, 64)), {}, "adapter_config.json implies rank 4"),
    "nan": (put(f"{Q}.lora_B.weight", torch.full((64, 4), torch.nan)), {}, r"\(lora_B\) has weights that are NaN"),
    "half": (lambda tensors: tensors.__delitem__(f"{Q}.lora_A.weight"), {}, "q_proj has no lora_A"),
    "integers": (put(f"{Q}.lora_A.weight", torch.ones(4, 64, dtype=torch.int8)), {}, "is torch.int8"),
    "bias": (put(f"{Q}.bias", torch.ones(64)), {}, "is not a matrix of an adapter; merge it into its base"),
    "expert": (
        put("base_model.model.model.layers.1.mlp.experts.0.up_proj.lora_A.weight", torch.ones(4, 64)),
        {},
        "lora_B",
    ),
    "dense expert": (
        lambda tensors: tensors.update(
            {f"base_model.model.model.layers.1.mlp.experts.0.up_proj.lora_{s}.weight": torch.ones(4, 4) for s in "AB"}
        ),
        {},
        "experts.0.up_proj is of a layer that adapters cannot change here; they may change down_proj, embed_tokens",
    ),
    "layer": (
        lambda tensors: tensors.update(
            {f"base_model.model.score.lora_{side}.weight": torch.ones(4, 4) for side in "AB"}
        ),
        {},
        "score is of a layer that adapters cannot change here; they may change down_proj, embed_tokens, gate_proj",
    ),
    "embedding": (
        put("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(4, 96)),
        {},
        "embed_tokens has no lora_B",
    ),
    "large": (put(f"{Q}.lora_A.weight", torch.ones(4, 64)), {"r": 128}, "has rank 128, above max_lora_rank=64"),
    "empty": (dict.clear, {}, "has no matrices"),
    "dora": (put("x", torch.ones(1)), {"use_dora": True}, "use_dora=True: DoRA is not served; merge it"),
    "saved": (
        put("x", torch.ones(1)),
        {"modules_to_save": ["lm_head"]},
        r"modules_to_save=\['lm_head'\]: whole modules",
    ),
    "biases": (put("x", torch.ones(1)), {"bias": "all"}, "bias=all: trained biases are not served"),
    "kind": (put("x", torch.ones(1)), {"peft_type": "IA3"}, "peft_type=IA3: only LORA is served"),
    "pissa": (put("x", torch.ones(1)), {"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conv"),
    "zero": (put("x", torch.ones(1)), {"r": 0}, "r=0: a rank must be an integer of at least 1"),
    "alpha": (put("x", torch.ones(1)), {"lora_alpha": "16"}, "lora_alpha=16: must be a number"),
    "pattern": (put("x", torch.ones(1)), {"rank_pattern": {"(": 4}}, r"pattern '\(' is no regular expression"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_refused_by_name(adapted: Adapted, tmp_path: Path, case: str) -> None:
    """Before a start, by the same reader that ranks use."""
    change, config, message = CASES[case]
    spec = adapted.spec(lora=LoraConfig({"odd": changed(adapted, tmp_path / "odd", change, **config)}, 2, 64))
    with pytest.raises(ValueError, match=message) as refusal:
        check_weights(spec, plan_engine(spec))
    assert str(refusal.value).startswith("lora.modules.odd: ")


def test_an_adapter_that_fits_is_accepted_before_a_start_and_its_tables_are_counted(adapted: Adapted) -> None:
    spec = adapted.spec(lora=LoraConfig(adapted.adapters, 3, 60), ranks=2)
    engine = plan_engine(spec)
    check_weights(
        dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, lora=LoraConfig(adapted.adapters, 3, 64))),
        engine,
    )
    inputs, outputs = 3 * 64 + 32 + 2 * 64 + 48, (32 + 16 + 16) + 64 + 96 + 64
    vocabulary = 2 * (VOCAB // 2 + 64)
    assert plan_weights(spec, engine, False).adapters == 3 * 64 * 4 * (4 * (inputs + outputs) + vocabulary)


def test_scales_are_those_of_peft(adapted: Adapted) -> None:
    mixed, middle = (read_adapter_config(adapted.adapters[name]) for name in ("mixed", "middle"))
    assert [mixed.rank_of(f"model.layers.{i}.self_attn.o_proj") for i in (1, 2)] == [8, 3]
    assert (
        mixed.scale_of("model.layers.0.mlp.up_proj") == 40 / 8 and mixed.scale_of("model.layers.0.mlp.down_proj") == 1
    )
    assert middle.scale_of("model.layers.0.self_attn.q_proj") == pytest.approx(16 / 8**0.5)


@pytest.mark.filterwarnings(
    "ignore:The following .* keys did not match", "ignore:Setting `save_embedding_layers`"
)  # peft
@pytest.mark.parametrize(
    ("architecture", "settings", "modules"),
    [
        ("Qwen3Moe", {}, ["q_proj", "mlp.gate"]),
        ("Qwen3Next", {}, ["in_proj_ba", "shared_expert_gate"]),
        ("Gemma4", {}, ["embed_tokens_per_layer"]),
    ],
)
def test_layers_that_adapters_cannot_change_are_refused_by_name(
    tmp_path: Path, architecture: str, settings: dict[str, Any], modules: list[str]
) -> None:
    """Adapters that peft makes of them."""
    target = make_target(tmp_path / "target", architecture=architecture)
    adapter = make_adapter(tmp_path / "adapter", target, 3, target_modules=modules, **settings)
    spec = spec_of(target, LoraConfig({"odd": str(adapter)}))
    with pytest.raises(
        ValueError, match=r"lora\.modules\.odd: .*(cannot change here|not served|only with lora\.experts)"
    ):
        check_weights(spec, plan_engine(spec))


def test_models_without_such_layers_refuse_adapters(tmp_path: Path) -> None:
    """GPT-2's products are no linear layers of transformers."""
    make_known(tmp_path, "gpt2")
    spec = spec_of(tmp_path, LoraConfig())
    with pytest.raises(ValueError, match="has no layers that adapters may change"):
        check_weights(spec, plan_engine(spec))
