"""What the adapter replaces so that a layer has fewer kernels: norms, gated MLPs, linear layers with the same input,
rotations. Which modules match is decided by results; answers of whole models are compared in `test_adapter`."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aerie.kernels.span import Span
from aerie.speculative.build import EngineSpec, local_engine
from aerie.workers.config import ModelSource
from aerie.workers.distributed.tp_group import SOLO
from aerie.workers.layers.linear import finish_weights
from aerie.workers.layers.norm import FullPrecisionRMSNorm, RMSNorm, ZeroCentredRMSNorm
from aerie.workers.models.adapter.config import AdapterConfig
from aerie.workers.models.adapter.matching import match_gated_mlp, match_norm
from aerie.workers.models.adapter.model import TransformersModel, match_block
from aerie.workers.models.adapter.replace import GatedMLP, Merged, Part, can_merge
from aerie.workers.models.adapter.rotation import RotationRecorder
from aerie.workers.models.decoder import Decoder
from aerie.workers.models.loading import _default_dtype as default_dtype
from aerie.workers.models.loading import read_target_config
from aerie.workers.scheduling.plan import SamplingParams
from tests.support.int_checkpoints import pack_quantized, quantise
from tests.support.kernels.launches import counted_launches
from tests.support.known_models import known_config, make_known
from tests.support.slow import slow
from tests.workers.models.adapter.test_adapter import architecture_of, set_field
from tests.workers.models.test_targets import check_greedy, prompts, worker_of

CPU = torch.device("cpu")


def made(
    folder: Path, kind: str, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[AdapterConfig, TransformersModel]:
    """The adapter's configuration, and its model on the meta device. dtype: torch's default while it is built."""
    known_config(kind, **options).save_pretrained(folder)
    set_field(folder, "architectures", [architecture_of(kind)])
    source = ModelSource(path=str(folder), device="cpu", implementation="transformers")
    config = read_target_config(source, 1)
    assert isinstance(config, AdapterConfig)
    with torch.device("meta"), default_dtype(dtype):
        return config, TransformersModel(config, SOLO, 8, CPU)


@pytest.mark.parametrize(
    ("kind", "mlps", "merged", "norms", "rotations"),
    [
        ("llama", 4, 4, 9, 4),
        ("gemma", 4, 4, 9, 4),  # norms of 1 + weight, GELU
        ("qwen3", 4, 4, 17, 4),  # norms of q and k
        ("phi3", 4, 0, 9, 4),  # qkv in one matrix, gate_up in one
        ("cohere", 4, 4, 0, 0),  # LayerNorms; rotated pairs
        ("glm4", 4, 4, 17, 0),  # rotated pairs
        ("seed_oss", 4, 4, 9, 4),
        ("arcee", 0, 4, 9, 4),  # MLPs of two matrices, without a gate
        ("smollm3", 4, 4, 9, 3),  # a layer without RoPE
        ("hunyuan_v1_dense", 4, 4, 17, 0),  # norms after RoPE
        ("mixtral", 0, 4, 9, 4),  # experts
        ("gpt2", 0, 0, 0, 0),
    ],
)
def test_modules_that_match_are_replaced(
    tmp_path: Path, kind: str, mlps: int, merged: int, norms: int, rotations: int
) -> None:
    config, model = made(tmp_path, kind)
    counts = Counter(type(module) for module in model.modules())
    assert (counts[GatedMLP], counts[Merged]) == (mlps, merged)
    assert sum(isinstance(module, RMSNorm) for module in model.modules()) == norms
    assert sum(call.rotary is not None for call in config.calls) == rotations


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float16)])
def test_modules_are_compared_in_float32_whatever_the_models_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    """Gemma adds 1 to the weight in float32. Added in bfloat16, the norm would be another one."""
    for kind, norm in (("seed_oss", RMSNorm), ("gemma", ZeroCentredRMSNorm)):
        _, model = made(tmp_path / kind, kind, dtype)
        counts = Counter(type(module) for module in model.modules())
        assert (counts[GatedMLP], counts[Merged], counts[norm]) == (4, 4, 9)


class Norm(nn.Module):
    """A norm in transformers' ways, by `kind`."""

    def __init__(self, kind: str, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(64, device="meta"))
        self.kind, self.eps = kind, eps

    def forward(self, x: Tensor) -> Tensor:
        full = x.float()
        if self.kind == "layer norm":
            full = full - full.mean(-1, keepdim=True)
        out = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.kind == "1 + weight":
            return (out * (1.0 + self.weight.float())).type_as(x)
        if self.kind == "rounded last":
            return (self.weight.float() * out).to(x.dtype)
        return self.weight * out.to(x.dtype)


@pytest.mark.parametrize("eps", [1e-6, 1e-5])
@pytest.mark.parametrize(
    ("kind", "ours"),
    [
        ("plain", RMSNorm),
        ("1 + weight", ZeroCentredRMSNorm),
        ("rounded last", FullPrecisionRMSNorm),
        ("layer norm", None),
    ],
)
def test_a_norm_is_replaced_by_one_with_its_roundings(kind: str, ours: type[RMSNorm] | None, eps: float) -> None:
    match = match_norm(Norm(kind, eps), torch.bfloat16)
    assert match is None if ours is None else match is not None and (match.kind, match.eps) == (ours, eps)


class MLP(nn.Module):
    """transformers' gated MLP, with another formula."""

    def __init__(self, formula: Callable[[Tensor, Tensor], Tensor], bias: bool = False) -> None:
        super().__init__()
        self.down_proj = nn.Linear(96, 64, bias, device="meta")
        self.up_proj, self.gate_proj = (nn.Linear(64, 96, bias, device="meta") for _ in range(2))
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.formula(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("formula", "activation"),
    [
        (lambda gate, up: nn.functional.silu(gate) * up, "silu"),
        (lambda gate, up: up * nn.functional.gelu(gate, approximate="tanh"), "gelu_pytorch_tanh"),
        (lambda gate, up: nn.functional.gelu(gate) * up, None),
        (lambda gate, up: nn.functional.silu(gate) * up.clamp(max=1.0), None),
        (lambda gate, up: nn.functional.silu(gate) + up, None),
    ],
)
def test_a_gated_mlp_is_known_by_its_results(
    formula: Callable[[Tensor, Tensor], Tensor], activation: str | None, bias: bool
) -> None:
    match = match_gated_mlp(MLP(formula, bias))
    if activation is None:
        assert match is None
    else:
        assert match is not None and match.activation == activation
        assert (match.gates, match.down) == (("gate_proj", "up_proj"), "down_proj")


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("llama", 4),
        ("qwen3", 4),
        ("phi3", 4),
        ("mixtral", 4),  # experts
        ("granite", 0),  # factors on what is added
        ("cohere", 0),  # attention beside the MLP
        ("gemma2", 0),  # norms before and after
        ("olmo2", 0),  # norms after
        ("gpt2", 0),
    ],
)
def test_layers_that_norm_their_sum_are_replaced(tmp_path: Path, kind: str, layers: int) -> None:
    _, model = made(tmp_path, kind, **({"residual_multiplier": 0.5} if kind == "granite" else {}))
    assert sum(vars(module).get("forward") is not None for module in blocks_of(model)) == layers


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [module for lists in model.modules() if isinstance(lists, nn.ModuleList) for module in lists]


class Layer(nn.Module):
    """A decoder layer in transformers' way, with something else in it by `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.self_attn, self.mlp = nn.Linear(8, 8), nn.Linear(8, 8)
        self.first, self.second = RMSNorm(8, 1e-6), RMSNorm(8, 1e-6)

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **others: Any) -> Any:
        mask = {"attention_mask": 1 if self.kind == "own mask" else others["attention_mask"]}
        normed = self.first(hidden_states)
        attended = self.self_attn(hidden_states=normed, position_embeddings=position_embeddings, **mask)
        attended = attended if self.kind == "tensor" else attended[0]
        sums = hidden_states + attended * (0.5 if self.kind == "factor" else 1.0)
        out = self.mlp(self.second(hidden_states if self.kind == "beside" else sums))
        if self.kind == "tuple of the mlp" and isinstance(out, tuple):
            out = out[0]
        out = (normed if self.kind == "residual of the norm" else sums) + out
        return (out,) if self.kind == "returns a tuple" else out


@pytest.mark.parametrize(
    ("kind", "matches"),
    {
        "plain": True,
        "tensor": True,
        "own mask": False,
        "factor": False,
        "beside": False,
        "tuple of the mlp": False,
        "residual of the norm": False,
        "returns a tuple": False,
    }.items(),
)
def test_a_layer_is_known_by_its_results(kind: str, matches: bool) -> None:
    found = match_block(Layer(kind), "self_attn")
    assert (found is not None) == matches
    if found is not None:
        assert (found.before, found.after, found.mlp) == ("first", "second", "mlp")
        assert found.in_tuple == (kind != "tensor") and set(found.passed) == {"position_embeddings", "attention_mask"}


class Rotating(nn.Module):
    """An attention module that changes queries before or after their rotation."""

    def __init__(self, before: float, after: float) -> None:
        super().__init__()
        self.before, self.after = before, after

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = rotary(q if self.before == 1.0 else q * self.before, k, cos, sin)
        return q if self.after == 1.0 else q * self.after, k


class AnglesOf(nn.Module):
    def __init__(self, interleaved: bool) -> None:
        super().__init__()
        self.inv_freq = nn.Buffer(torch.empty(4, device="meta"), persistent=False)
        self.interleaved = interleaved

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * self.inv_freq
        both = angles.repeat_interleave(2, -1) if self.interleaved else torch.cat((angles, angles), -1)
        return both.cos(), both.sin()


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]

    return turned(q), turned(k)


@pytest.mark.parametrize(
    ("before", "after", "interleaved", "found"),
    [(1.0, 1.0, False, "rotary"), (0.5, 1.0, False, "rotary"), (1.0, 0.5, False, None), (1.0, 1.0, True, None)],
)
def test_a_rotation_is_deferred_where_attention_gets_its_result(
    before: float, after: float, interleaved: bool, found: str | None
) -> None:
    model = nn.Module()
    model.attention, model.angles = Rotating(before, after), AnglesOf(interleaved)
    recorder = RotationRecorder(model)
    cos, sin = model.angles(torch.zeros(1, 3, dtype=torch.int64, device="meta"))
    q, k = (torch.empty(1, heads, 3, 8, device="meta") for heads in (4, 2))
    q, k = model.attention(q, k, cos, sin)
    assert recorder.function_of("attention", q, k) == found


def test_merged_layers_give_each_its_output_in_any_order() -> None:
    generator = torch.Generator().manual_seed(2)
    rows = {"q": Span.whole(6), "k": Span.whole(4), "v": Span.whole(2)}
    merged = Merged(16, rows, bias=True)
    merged.fill_dummy(generator)
    assert merged.bias is not None
    merged.bias.data.fill_(1.0)
    finish_weights(merged)
    parts: list[nn.Module] = [merged, Part(merged, 1), Part(merged, 2)]
    for order in ((0, 1, 2), (2, 0, 1), (1, 1, 0, 2, 2)):
        x = torch.randn(1, 5, 16, generator=generator)
        for index in order:
            weight: Tensor = parts[index].weight  # type: ignore[assignment]
            expected = nn.functional.linear(x, weight, torch.ones(weight.shape[0]))
            torch.testing.assert_close(parts[index](x), expected)
    x, y = torch.randn(2, 1, 5, 16, generator=generator)
    first, other = parts[1](x), parts[1](y)
    assert not torch.equal(first, other) and torch.equal(parts[1](x), first)


def test_quantised_layers_share_no_block_of_scales() -> None:
    aligned, odd = Span(128, 256, 512), Span(0, 64, 64)
    assert can_merge([aligned, aligned], is_quantised=True)
    assert not can_merge([aligned, odd], is_quantised=True) and can_merge([aligned, odd], is_quantised=False)


def test_merged_layers_of_4_bits_are_served(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    target = make_known(tmp_path / "t", "seed_oss", head_dim=128, num_hidden_layers=2, **sizes)
    folder = quantise(target, tmp_path / "q", pack_quantized())
    source = ModelSource(path=str(folder), device="cpu")
    config = read_target_config(source, 1)
    assert isinstance(config, AdapterConfig)
    with torch.device("meta"):
        assert sum(isinstance(each, Merged) for each in TransformersModel(config, SOLO, 8, CPU).modules()) == 2
    check_greedy(folder, like=folder / "plain")


@pytest.fixture
def launches_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str, str], int]]:
    """Launches of a layer in a decode pass of two requests, by the model's type and implementation."""
    found: list[int] = []

    def counted(model: type[nn.Module]) -> None:
        whole = model.forward

        def forward(self: Any, ids: Tensor, context: Any) -> Any:
            with pytest.MonkeyPatch.context() as patches, counted_launches(patches) as counts:
                out = whole(self, ids, context)
            found.append(counts.total())
            return out

        monkeypatch.setattr(model, "forward", forward)

    def last(kind: str, implementation: str, layers: int) -> int:
        folder = tmp_path / f"{kind}-{implementation}-{layers}"
        target = make_known(folder, kind, num_hidden_layers=layers)
        worker = worker_of(target)
        worker = replace(worker, model=replace(worker.model, implementation=implementation))
        with local_engine(EngineSpec(worker)) as engine:
            engine.generate(prompts()[:2], SamplingParams(4, 0.0), 2)
        return found[-1]

    counted(Decoder)
    counted(TransformersModel)
    yield lambda kind, implementation: last(kind, implementation, 2) - last(kind, implementation, 1)


@pytest.mark.parametrize(("kind", "more"), [("qwen3", 3), *slow(("llama", 1))])
def test_a_layer_launches_little_more_than_in_an_own_class(
    launches_of: Callable[[str, str], int], kind: str, more: int
) -> None:
    """The addition of the MLP; with norms of q and k also these, which the kernel that rotates has in own classes."""
    own = launches_of(kind, "auto")
    assert own == 8
    assert launches_of(kind, "transformers") == own + more
