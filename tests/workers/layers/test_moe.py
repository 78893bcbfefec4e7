"""Mixtures of experts: who is chosen and how much they count, their products, their shards, and what is refused.
Routing is compared with the equations of the papers, written out row by row."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from aerie.attention.backends.torch_backend import TorchBackend
from aerie.attention.kv_cache.layout import HeadsLayout, LayerGroup
from aerie.attention.kv_cache.pool import KVPool
from aerie.kernels.capability import Capability
from aerie.kernels.experts.grouped import experts_one_by_one, grouped_experts
from aerie.kernels.experts.route import Routing, route
from aerie.kernels.kv.batches import Mode, PrefillBatch
from aerie.speculative.build import local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import ModelSource, WorkerConfig
from aerie.workers.distributed.tp_group import SOLO, TPGroup
from aerie.workers.layers.forward_context import make_context
from aerie.workers.layers.linear import finish_weights
from aerie.workers.layers.moe import MixtureOfExperts
from aerie.workers.layers.routing import Router
from aerie.workers.layers.weighted import WeightedModule, WeightKey
from aerie.workers.models.decoder import Decoder
from aerie.workers.models.loading import load_target, read_target_config
from aerie.workers.models.moe import check_experts_device
from aerie.workers.runner.deterministic import refusal
from aerie.workers.scheduling.plan import SamplingParams
from tests.speculative.conftest import Pair
from tests.support.tiny_models import VOCAB, make_eagle, make_eagle3, make_target

CPU = torch.device("cpu")
ROUTINGS = {
    "V2-Lite": Routing(8, 3),
    "V2": Routing(12, 3, num_groups=4, groups_per_token=2, scale=16.0),
    "V3": Routing(12, 4, "sigmoid", 4, 2, 2, has_bias=True, normalise=True, scale=2.5),
    "Kimi-K2": Routing(10, 4, "sigmoid", 1, 1, 2, has_bias=True, normalise=True, scale=2.827),
    "Qwen3": Routing(8, 2, normalise=True),
}


def by_the_papers(logits: list[float], bias: list[float], routing: Routing) -> dict[int, float]:
    """The experts of one row and their weights."""
    if routing.scoring == "softmax":
        scores = [math.exp(x) / sum(math.exp(y) for y in logits) for x in logits]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    preference = [s + b for s, b in zip(scores, bias, strict=True)]
    size = routing.num_experts // routing.num_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(routing.num_groups)]

    def worth(group: list[int]) -> float:
        return sum(sorted((preference[e] for e in group), reverse=True)[: routing.best_of_group])

    best = sorted(groups, key=worth, reverse=True)[: routing.groups_per_token]
    allowed = [e for group in best for e in group]
    chosen = sorted(allowed, key=lambda e: preference[e], reverse=True)[: routing.experts_per_token]
    total = sum(scores[e] for e in chosen) if routing.normalise else 1.0
    return {e: scores[e] / total * routing.scale for e in chosen}


@pytest.mark.parametrize("name", ROUTINGS)
def test_routing_is_that_of_the_papers(name: str) -> None:
    """The bias is so large that preferences are below zero, and so uneven that it changes who is chosen."""
    routing, generator = ROUTINGS[name], torch.Generator().manual_seed(3)
    logits = torch.randn(40, routing.num_experts, generator=generator) * 2
    bias = torch.randn(routing.num_experts, generator=generator) - 2 if routing.has_bias else None
    chosen, weight = route(logits, bias, routing)
    assert weight.dtype == torch.float32
    other = 0
    for row in range(40):
        given = [0.0] * routing.num_experts if bias is None else bias.tolist()
        expected = by_the_papers(logits[row].tolist(), given, routing)
        other += expected.keys() != by_the_papers(logits[row].tolist(), [0.0] * routing.num_experts, routing).keys()
        found = dict(zip(chosen[row].tolist(), weight[row].tolist(), strict=True))
        assert found == pytest.approx(expected, rel=1e-5)  # float32 against float64
    assert (other > 0) == routing.has_bias


def test_a_bias_of_logits_is_in_choice_and_weights() -> None:
    """As in gpt-oss: softmax of the chosen logits alone."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

    theirs = GptOssTopKRouter(GptOssConfig(hidden_size=32, num_local_experts=8, num_experts_per_tok=3))
    ours, generator = Router(32, Routing(8, 3, normalise=True, biased_logits=True)), torch.Generator().manual_seed(0)
    for name, parameter in theirs.requires_grad_(False).named_parameters():
        parameter.normal_(generator=generator)
        ours.load(WeightKey(name), parameter)
    x = torch.randn(50, 32, generator=generator)
    _, weight, chosen = theirs(x)
    found_chosen, found_weight = ours(x).choose()

    def whole(chosen: Tensor, weight: Tensor) -> Tensor:
        return torch.zeros(50, 8).scatter(1, chosen, weight)

    torch.testing.assert_close(whole(found_chosen, found_weight), whole(chosen, weight))


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"scoring": "tanh"}, "scoring_func='tanh' is not supported"),
        ({"num_groups": 5}, "n_group=5 does not divide the 12 experts"),
        ({"groups_per_token": 5}, "topk_group=5 of n_group=4 with 3 experts each"),
        ({"num_groups": 12}, "topk_group=2 of n_group=12 with 1 experts each"),
        ({"experts_per_token": 7}, "num_experts_per_tok=7: must be 1 to the 6 experts"),
    ],
)
def test_routing_that_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"model x: {message}"):
        dataclasses.replace(ROUTINGS["V3"], **changes).check("model x")  # type: ignore[arg-type]


def case(rows: int, experts: int = 5, width: int = 24, hidden: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return (
        torch.randn(rows, hidden, generator=generator),
        torch.randn(experts, 2 * width, hidden, generator=generator),
        torch.randn(experts, hidden, width, generator=generator),
    )


@pytest.mark.parametrize("rows", [1, 7, 33])
def test_grouped_products_are_those_of_one_expert_after_the_other(rows: int) -> None:
    """Expert 3 is nobody's."""
    x, gate_up, down = case(rows)
    generator = torch.Generator().manual_seed(1)
    chosen = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(rows)])
    chosen, weight = chosen + (chosen == 3), torch.rand(rows, 2, generator=generator)
    expected = torch.zeros_like(x)
    for row in range(rows):
        for expert, share in zip(chosen[row].tolist(), weight[row].tolist(), strict=True):
            gate, up = (gate_up[expert] @ x[row]).chunk(2)
            expected[row] += share * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    for multiply in (grouped_experts, experts_one_by_one):
        out = multiply(x, chosen, weight, gate_up, down)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)  # sums of 24 in another order, values to 50


@pytest.mark.parametrize("width", [24, 26], ids=["grouped", "one by one"])
def test_rows_do_not_touch_each_other(width: int) -> None:
    """Whatever stands in padding rows, of which there may be any number."""
    torch.manual_seed(0)
    layer = MixtureOfExperts(16, width, ROUTINGS["V3"], SOLO, shared_width=8)
    for module in layer.modules():
        if isinstance(module, WeightedModule):
            module.fill_dummy(torch.Generator().manual_seed(5))
    finish_weights(layer)
    x = torch.randn(6, 16)
    expected = layer.partial(x)
    for padding in (torch.zeros(3, 16), torch.full((3, 16), float("nan")), torch.full((1, 16), float("inf"))):
        torch.testing.assert_close(layer.partial(torch.cat((x, padding)))[:6], expected)


def load(folder: Path, group: TPGroup = SOLO, expert_parallel: bool = False, **settings: str) -> Decoder:
    source = ModelSource(path=str(folder), device="cpu", **settings)
    return load_target(source, read_target_config(source, group.size, expert_parallel), group, CPU, 64)


def test_experts_are_cut_along_their_width(tmp_path: Path) -> None:
    folder = make_target(tmp_path / "t", architecture="Qwen3Moe", num_hidden_layers=1)
    whole, halves = load(folder).layers[0].mlp, [load(folder, TPGroup(r, 2)).layers[0].mlp for r in range(2)]
    assert halves[0].experts.method.down.shape == (6, 64, 24)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(sum(half.partial(x) for half in halves), whole.partial(x))


@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize(
    "ranks,settings",
    [
        (2, {"architecture": "Qwen3Moe"}),
        (2, {"architecture": "Qwen3Moe", "moe_intermediate_size": 50}),
        (2, {"architecture": "DeepseekV3"}),
        (4, {"architecture": "DeepseekV3"}),
    ],
    ids=["Qwen3, 2", "one by one, 2", "V3, 2", "V3, 4"],
)
def test_ranks_may_have_whole_experts(tmp_path: Path, ranks: int, settings: dict[str, object], rows: int) -> None:
    """With one row some ranks' experts are nobody's; DeepSeek-V3 has a shared one too, which is cut."""
    folder = make_target(tmp_path / "t", num_hidden_layers=2, **settings)
    whole = load(folder).layers[1].mlp
    parts = [load(folder, TPGroup(rank, ranks), expert_parallel=True).layers[1].mlp for rank in range(ranks)]
    num, width = whole.experts.shape.num_experts, whole.experts.shape.width
    assert parts[0].experts.method.down.shape == (num // ranks, 64, width)
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(sum(part.partial(x) for part in parts), whole.partial(x))


def test_what_is_multiplied_by_nothing_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its memory was."""
    x, gate_up, down = case(9)
    chosen = torch.tensor([[0, 5], [5, 5], [4, 1]]).repeat(3, 1)
    weight = torch.rand(9, 2, generator=torch.Generator().manual_seed(1))
    expected = grouped_experts(x, chosen.clamp(max=4), weight * (chosen < 5), gate_up, down)
    multiply = torch.nn.functional.grouped_mm

    def poisoned(x: Tensor, matrices: Tensor, offs: Tensor) -> Tensor:
        out = multiply(x, matrices, offs=offs)
        out[int(offs[-1]) :] = float("nan")
        return out

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", poisoned)
    torch.testing.assert_close(grouped_experts(x, chosen, weight, gate_up, down, partly=True), expected)


def test_rows_whose_kv_is_there_are_no_padding_to_experts() -> None:
    """They run for the states of recurrent layers, and write to page 0 as padding does (`PrefillBatch.store_from`)."""
    pool = KVPool([LayerGroup((0,), HeadsLayout(1, 8, torch.float32))], 4, 4, CPU)
    table = torch.tensor([[1, 2], [3, 0]], dtype=torch.int32)
    chunks = PrefillBatch.from_lists([0, 0], [6, 2], table, num_rows=10)
    chunks = dataclasses.replace(chunks, store_from=torch.tensor([5, 0], dtype=torch.int32))
    context = make_context(pool, {Mode.PREFILL: TorchBackend()}, None, None, chunks)
    live = context.token_slots.slots >= context.token_slots.first
    assert live.tolist() == [True] * 8 + [False] * 2
    assert (context.slot_mapping >= 4).tolist() == [False] * 5 + [True] * 3 + [False] * 2


@pytest.mark.parametrize(
    "architecture,ranks,message",
    [
        ("Llama", 2, "expert_parallel=true: model .* has no experts; leave it out"),
        ("Qwen3Moe", 4, r"tensor_parallel=4: does not divide .*the number of experts=6\); try one of \[1, 2\]"),
    ],
)
def test_experts_that_cannot_be_dealt_out_are_refused(
    tmp_path: Path, architecture: str, ranks: int, message: str
) -> None:
    source = ModelSource(path=str(make_target(tmp_path / "t", architecture=architecture, num_hidden_layers=1)))
    with pytest.raises(ValueError, match=message):
        read_target_config(source, ranks, expert_parallel=True)


@pytest.mark.slow  # experts with latent rows: `tests.workers.models.test_deepseek`
def test_speculation_changes_no_token(tmp_path: Path) -> None:
    target = make_target(tmp_path / "t", architecture="Qwen3Moe", calm=0.01)
    check_speculation(tmp_path, target)


def check_speculation(folder: Path, target: Path, plain: Path | None = None) -> None:
    """Chains and trees of a head that guesses well, on two ranks too, and of one that does not, answer as the target
    alone does. plain: the target without quantisation, for which heads are made."""
    eagle = make_eagle(folder / "eagle", plain or target, copying=True)
    eagle3 = make_eagle3(
        folder / "eagle3", plain or target, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    )
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (3, 41, 18, 60, 9)]
    pair, greedy = Pair(target, eagle, eagle3, prompts), SamplingParams(16, 0.0)

    def answers(speculative: SpeculativeConfig | None, tensor_parallel: int = 1) -> tuple[list[list[int]], int]:
        with local_engine(pair.spec(speculative, tensor_parallel=tensor_parallel)) as engine:
            requests = engine.generate(pair.prompts, greedy, 3)
        return [r.output for r in requests], sum(k * n for r in requests for k, n in enumerate(r.acceptance_histogram))

    alone, _ = answers(None)
    other = SpeculativeConfig(str(eagle3), "eagle3", 3, 4, 12)
    for speculative, ranks in ((pair.chain(), 1), (pair.tree(), 1), (pair.tree(), 2), (other, 1)):
        outputs, accepted = answers(speculative, ranks)
        assert outputs == alone
        assert accepted > 10 or speculative.method == "eagle3"  # equality means little where nothing is accepted


def test_dummies_need_no_weights(tmp_path: Path) -> None:
    folder = make_target(tmp_path / "t", architecture="Qwen3Moe", num_hidden_layers=1)
    (folder / "model.safetensors").unlink()
    layer = load(folder, load_format="dummy").layers[0].mlp
    assert torch.isfinite(layer.partial(torch.ones(2, 64))).all() and layer.experts.method.down.std() > 0.01


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"num_experts": None, "num_local_experts": None}, "config.json lacks 'num_experts'"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7: must be 1 to the 6 experts"),
        ({"moe_intermediate_size": 51}, r"tensor_parallel=2: does not divide .*moe_intermediate_size=51\)"),
    ],
)
def test_configurations_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    folder = make_target(tmp_path / "t", architecture="Qwen3Moe", num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        read_target_config(ModelSource(path=str(folder)), 2)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_target(tmp_path / "t", architecture="Qwen3Moe", num_hidden_layers=1)
    tensors = load_file(str(folder / "model.safetensors"))
    del tensors["model.layers.0.mlp.experts.4.up_proj.weight"]
    save_file(tensors, str(folder / "model.safetensors"))
    for group, expert_parallel in ((SOLO, False), (TPGroup(0, 2), True)):  # rank 1's
        with pytest.raises(ValueError, match="missing: model.layers.0.mlp.experts.4.up_proj.weight$"):
            load(folder, group, expert_parallel)


def test_gpus_whose_experts_would_wait_are_refused() -> None:
    gpu = Capability("cuda", (8, 0))
    with pytest.raises(ValueError, match="model x: experts on a GPU are multiplied in bfloat16, not in float16"):
        check_experts_device(gpu, torch.float16, "model x")
    with pytest.raises(ValueError, match="compute capability 9.x or 10.x, this one has 8.0"):
        check_experts_device(gpu, torch.bfloat16, "model x")
    for capability in ((9, 0), None):  # None: of another machine's GPU
        check_experts_device(Capability("cuda", capability), torch.bfloat16, "model x")


@pytest.mark.parametrize(
    "width,ranks,reason",
    [
        (256, 1, None),
        (256, 2, None),
        (96, 1, None),
        (100, 1, "moe_intermediate_size of 100 on each rank: the GEMMs need a multiple of 8"),
        (104, 2, "moe_intermediate_size of 52 on each rank"),
        (104, -2, None),
    ],
)
def test_experts_are_deterministic_where_their_kernels_fit(
    tmp_path: Path, width: int, ranks: int, reason: str | None
) -> None:
    """Layers without experts, which there are none of, need not fit. Negative: ranks that have whole experts."""
    whole, ranks = ranks < 0, abs(ranks)
    sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 100, "moe_intermediate_size": width}
    source = ModelSource(path=str(make_target(tmp_path / "t", architecture="Qwen3Moe", num_hidden_layers=1, **sizes)))
    worker = WorkerConfig(source, deterministic=True, tensor_parallel=ranks)
    found = refusal(worker, read_target_config(source, ranks, whole), torch.bfloat16)
    assert found is None if reason is None else found is not None and found.startswith(reason)
