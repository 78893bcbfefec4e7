"""Name maps, and loading by them: parts, experts, scales beside weights, nestings, ties, and what does not fit."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.span import Span
from aerie.workers.distributed.tp_group import SOLO, TPGroup
from aerie.workers.layers import moe
from aerie.workers.layers.linear import (
    ColumnParallelLinear,
    GateUpParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    rank_span,
)
from aerie.workers.layers.norm import RMSNorm
from aerie.workers.layers.vocab import LMHead, VocabEmbedding
from aerie.workers.layers.weighted import WeightedModule, WeightKey, check_shape
from aerie.workers.models import weights
from aerie.workers.models.name_map import NameMap
from aerie.workers.models.weights import CheckpointTensor, checkpoint_tensors, fill_dummy, load_weights

NUM_EXPERTS, HIDDEN, WIDTH = 3, 6, 4


def numbered(*shape: int, start: int = 0) -> Tensor:
    """Whole numbers, each another, so that a wrong place shows."""
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).view(shape)


class Experts(WeightedModule):
    """gate_proj and up_proj of every expert in one tensor, with a scale for each."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(NUM_EXPERTS, 2 * WIDTH, HIDDEN), requires_grad=False)
        self.scales = nn.Parameter(torch.empty(NUM_EXPERTS, 2), requires_grad=False)

    def weight_keys(self) -> Iterator[WeightKey]:
        for expert in range(NUM_EXPERTS):
            for part in ("gate_proj", "up_proj"):
                yield WeightKey("weight", part, expert)
                yield WeightKey("weight_scale_inv", part, expert)

    def load(self, key: WeightKey, full: Tensor) -> None:
        place = ("gate_proj", "up_proj").index(key.part)
        if key.kind == "weight":
            check_shape(full, (WIDTH, HIDDEN))
            self.gate_up.data[key.expert, place * WIDTH : (place + 1) * WIDTH] = full
        else:
            check_shape(full, (1,))
            self.scales.data[key.expert, place] = full[0]

    def fill_missing(self, key: WeightKey) -> bool:
        if key.kind == "weight":
            return False
        self.scales.data[key.expert, ("gate_proj", "up_proj").index(key.part)] = 1.0
        return True

    def fill_dummy(self, generator: torch.Generator) -> None:
        self.gate_up.data.normal_(generator=generator)
        self.scales.data.fill_(1.0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()
        self.norm = RMSNorm(HIDDEN, 1e-6)


NAMES = NameMap(
    rules={
        "{layer}.experts": "model.layers.{layer}.mlp.experts.{expert}.{part}",
        "{layer}.{norm}": "model.layers.{layer}.post_{norm}",
    },
    aliases=(("language_model.", ""), ("model.decoder.", "model.")),
    ignored=("*.rotary_emb.inv_freq", "model.layers.2.*"),
)


def blocks() -> nn.ModuleList:
    return nn.ModuleList([Block(), Block()])


def checkpoint() -> dict[str, Tensor]:
    tensors = {}
    for layer in range(2):
        for expert in range(NUM_EXPERTS):
            for place, part in enumerate(("gate_proj", "up_proj")):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{part}"
                number = 10 * layer + 2 * expert + place
                tensors[f"{name}.weight"] = numbered(WIDTH, HIDDEN, start=100 * number)
                tensors[f"{name}.weight_scale_inv"] = torch.tensor([float(number)])
        tensors[f"model.layers.{layer}.post_norm.weight"] = numbered(HIDDEN, start=layer)
    return tensors


def load(model: nn.Module, tensors: dict[str, Tensor], names: NameMap = NAMES, **options: frozenset[str]) -> None:
    given = (CheckpointTensor(name, tensor, "x.safetensors") for name, tensor in tensors.items())
    load_weights(model, given, names, "model x", **options)


def test_every_expert_goes_to_its_place_with_its_scale() -> None:
    model, tensors = blocks(), checkpoint()
    load(model, tensors)
    for layer, block in enumerate(model):
        for expert in range(NUM_EXPERTS):
            weight, scales = block.experts.gate_up[expert], block.experts.scales[expert]
            name = f"model.layers.{layer}.mlp.experts.{expert}"
            assert torch.equal(weight[:WIDTH], tensors[f"{name}.gate_proj.weight"])
            assert torch.equal(weight[WIDTH:], tensors[f"{name}.up_proj.weight"])
            assert scales.tolist() == [10.0 * layer + 2 * expert, 10.0 * layer + 2 * expert + 1]
        assert torch.equal(block.norm.weight, numbered(HIDDEN, start=layer))


def test_other_nestings_are_the_same_names() -> None:
    plain, nested = blocks(), blocks()
    load(plain, checkpoint())
    load(nested, {f"language_model.model.decoder.{k.removeprefix('model.')}": v for k, v in checkpoint().items()})
    for ours, theirs in zip(nested.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_what_the_map_ignores_may_be_there() -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": numbered(3), "model.layers.2.eh_proj.weight": numbered(2)}
    load(blocks(), checkpoint() | extra)


def test_what_has_a_default_may_be_missing() -> None:
    model, tensors = blocks(), checkpoint()
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight_scale_inv"]
    load(model, tensors)
    assert model[1].experts.scales[2].tolist() == [14.0, 1.0]


def test_all_that_does_not_fit_is_named_by_the_checkpoints_names() -> None:
    tensors = checkpoint()
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    tensors["model.layers.0.post_norm.weight"] = numbered(5)
    tensors["language_model.model.layers.0.mlp.gate.weight"] = numbered(2)
    with pytest.raises(ValueError) as error:
        load(blocks(), tensors)
    assert str(error.value) == (
        "model x: the checkpoint does not fit its config.json; "
        "missing: model.layers.1.mlp.experts.2.up_proj.weight; "
        "unexpected: language_model.model.layers.0.mlp.gate.weight (x.safetensors); "
        "wrong: model.layers.0.post_norm.weight (x.safetensors) has shape (5,), config.json implies (6,)"
    )


def test_of_many_names_the_first_few_are_named() -> None:
    with pytest.raises(ValueError, match=r"missing: (model\S+, ){3}model\S+ and 10 more$"):
        load(blocks(), {name: t for name, t in checkpoint().items() if name.endswith("scale_inv")})


def test_a_tensor_under_two_names_is_refused() -> None:
    twice = {"language_model.model.layers.0.post_norm.weight": numbered(HIDDEN)}
    with pytest.raises(
        ValueError,
        match=r"layers\.0\.post_norm\.weight \(x.safetensors\) is there twice$",
    ):
        load(blocks(), checkpoint() | twice)


def test_modules_that_others_fill_are_not_asked_for() -> None:
    tensors = {name: t for name, t in checkpoint().items() if "post_norm" not in name}
    load(blocks(), tensors, elsewhere=frozenset({"0.norm", "1.norm"}))


@pytest.mark.parametrize(
    "rules,message",
    [
        ({"{layer}.norm": "norm"}, "name map: no rule for 0.experts; there are {layer}.norm"),
        ({"{layer}.experts": "experts.{part}"}, "'experts.{part}' does not fit 0.experts, part 'gate_proj', expert 0"),
        ({"{layer}.experts": "experts.{layer}.{expert}"}, "does not fit 0.experts, part 'gate_proj', expert 0"),
        ({"{layer}.experts": "{part}.{expert}", "{layer}.norm": "{part}"}, "'{part}' does not fit 0.norm, part ''"),
    ],
)
def test_a_map_that_does_not_fit_the_model_says_where(rules: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError) as error:
        load(nn.ModuleList([Block()]), {}, NameMap(rules))
    assert message in str(error.value)


def test_a_parameter_that_nobody_loads_is_our_bug() -> None:
    model = blocks()
    model.bias = nn.Parameter(torch.zeros(1))
    with pytest.raises(AssertionError, match=r"no WeightedModule loads \['bias'\]"):
        load(model, checkpoint())
    with pytest.raises(AssertionError, match="no WeightedModule loads"):
        fill_dummy(model, 0)


def test_ranks_together_hold_every_row_and_column() -> None:
    """Eight query heads of 2 and two KV heads on four ranks, each of which shares a KV head with another."""
    size, head_dim = 4, 2
    q, k, v, bias = numbered(16, HIDDEN), numbered(4, HIDDEN, start=500), numbered(4, HIDDEN, start=600), numbered(16)
    gate, up, down = numbered(8, HIDDEN), numbered(8, HIDDEN, start=700), numbered(HIDDEN, 8)
    for rank in range(size):
        group = TPGroup(rank, size)
        qkv = QKVParallelLinear(HIDDEN, 8, 2, head_dim, group, bias=True)
        for part, full in (("q_proj", q), ("k_proj", k), ("v_proj", v)):
            qkv.load(WeightKey("weight", part), full)
            qkv.load(WeightKey("bias", part), bias[: full.shape[0]])
        heads, kv = slice(4 * rank, 4 * rank + 4), slice(2 * (rank // 2), 2 * (rank // 2) + 2)
        assert torch.equal(qkv.method.weight, torch.cat((q[heads], k[kv], v[kv])))
        assert torch.equal(qkv.bias, torch.cat((bias[heads], bias[kv], bias[kv])))
        qkv.finish(GEMMOptions())
        x = numbered(3, HIDDEN)
        assert torch.equal(qkv.keys_values(x), qkv(x)[:, 4:]), "without two query heads of 2"
        gate_up = GateUpParallelLinear(HIDDEN, 8, group, "intermediate_size")
        gate_up.load(WeightKey("weight", "gate_proj"), gate)
        gate_up.load(WeightKey("weight", "up_proj"), up)
        mine = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(gate_up.method.weight, torch.cat((gate[mine], up[mine])))
        row = RowParallelLinear(8, HIDDEN, group, "intermediate_size")
        row.load(WeightKey("weight"), down)
        assert torch.equal(row.method.weight, down[:, mine])


def test_a_vocabulary_that_does_not_divide_is_padded_with_zeros() -> None:
    full = numbered(5, HIDDEN, start=1)
    shards = []
    for rank in range(4):  # two ids each: the third rank has one, the last none
        group = TPGroup(rank, 4)
        embedding, head = VocabEmbedding(5, HIDDEN, group), LMHead(5, HIDDEN, group)
        for module in (embedding, head):
            module.load(WeightKey("weight"), full)
        assert torch.equal(embedding.weight, head.method.weight)
        shards.append(embedding.weight)
    assert torch.equal(torch.cat(shards), torch.cat((full, torch.zeros(3, HIDDEN))))


def test_a_tied_head_asks_for_nothing() -> None:
    embedding = VocabEmbedding(5, HIDDEN, SOLO)
    head = LMHead(5, HIDDEN, SOLO, embedding)
    assert list(head.weight_keys()) == [] and list(head.parameters()) == []


def test_quantised_weights_without_a_quantization_config_are_refused() -> None:
    model = nn.ModuleDict({"up": ColumnParallelLinear(HIDDEN, {"": Span.whole(4)})})
    tensors = {"up.weight": torch.zeros(4, HIDDEN, dtype=torch.float8_e4m3fn)}
    with pytest.raises(ValueError, match=r"up\.weight \(.*\) is torch.float8_e4m3fn, which .*quantization_config"):
        load(model, tensors, NameMap({"up": "up"}))


def test_dummy_weights_are_small_and_the_same_for_the_same_seed() -> None:
    model, other = blocks(), blocks()
    fill_dummy(model, 3)
    fill_dummy(other, 3)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs) and torch.isfinite(ours).all()


def test_dummy_shards_differ_between_ranks_and_replicated_weights_do_not() -> None:
    """Else partial sums of two ranks would be equal, and no rounding of their sum would be seen."""
    sharded = ("embedding", "column", "row", "experts", "head")
    models = []
    for rank in range(2):
        group = TPGroup(rank, 2)
        modules = {
            "replicated": ReplicatedLinear(HIDDEN, 6),
            "embedding": VocabEmbedding(8, HIDDEN, group),
            "column": ColumnParallelLinear(HIDDEN, {"": rank_span(6, group, "outputs")}),
            "row": RowParallelLinear(8, HIDDEN, group, "inputs"),
            "experts": moe.Experts(2, HIDDEN, 4, group, 1),
            "head": LMHead(8, HIDDEN, group),
            "last": ReplicatedLinear(HIDDEN, 6),
        }
        models.append(nn.ModuleDict(modules))
        fill_dummy(models[-1], 3, rank)
    for name, first in models[0].items():
        equal = [torch.equal(*pair) for pair in zip(first.parameters(), models[1][name].parameters(), strict=True)]
        assert equal and set(equal) == {name not in sharded}, name


def test_files_are_read_ahead_of_their_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte is asked for once, in order, and no more than the limit before its tensor is taken, since a checkpoint
    may be larger than the memory. Headers alone are not read ahead."""
    asked: list[tuple[str, int, int]] = []

    def advise(descriptor: int, start: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        asked.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, start, length))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(weights, "_READ_AHEAD", 3000)
    monkeypatch.setattr(weights, "_READ_STEP", 1000)
    for file in ("a", "b"):
        save_file({f"{file}.{i}": torch.zeros(450) for i in range(4)}, tmp_path / f"{file}.safetensors")
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert len(list(checkpoint_tensors(tmp_path, torch.device("meta")))) == 8 and not asked
    for taken, _ in enumerate(checkpoint_tensors(tmp_path)):
        total = sum(length for _, _, length in asked)
        assert min((taken + 1) * 1800, sum(sizes.values()) - 1800) <= total <= (taken + 1) * 1800 + 3000
    ends = dict.fromkeys(sizes, 0)
    for name, start, length in asked:
        assert start == ends[name] and length > 0
        ends[name] += length
    assert [name for name, _, _ in asked] == sorted(name for name, _, _ in asked)
    assert ends["a.safetensors"] == sizes["a.safetensors"] and ends["b.safetensors"] == sizes["b.safetensors"]
