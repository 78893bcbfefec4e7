"""Products of experts with weights of few bits, against what the weights mean in float64. On a GPU, or interpreted."""

import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed here")

from aerie.kernels.experts.gated import GPT_OSS, SWIGLU  # noqa: E402
from aerie.kernels.experts.route import RouterLogits, Routing  # noqa: E402
from aerie.kernels.gemm.workspace import GEMMOptions, Workspace  # noqa: E402
from aerie.kernels.packed import experts_triton  # noqa: E402
from aerie.kernels.packed.expert_tiles import PackedExpertTiles, PackedTiles, packed_expert_tiles, partial_sizes  # noqa: E402
from aerie.kernels.packed.experts import PackedExpertWeights, with_raised_scales  # noqa: E402
from aerie.kernels.packed.weight import Code, PackedWeight, dequantize, pack  # noqa: E402
from aerie.kernels.span import Span  # noqa: E402
from aerie.workers.distributed.tp_group import TPGroup  # noqa: E402
from aerie.workers.layers.moe import Experts  # noqa: E402
from aerie.workers.quantization.floats import GPT_OSS_MXFP4  # noqa: E402
from aerie.workers.quantization.packed_experts import PackedExperts  # noqa: E402
from tests.support.kernels.triton_interpreter import DEVICE, INTERPRETED, MARKS, kernels_of_operations  # noqa: E402

pytestmark = MARKS
SIZE, WIDTH = (96, 128) if INTERPRETED else (2880, 320)  # interpreted, 64 does not divide the size
OUT = torch.float32 if INTERPRETED else torch.bfloat16
# code, inputs that share a scale, whether there are zeros, whether there is a scale of the matrix
KINDS: dict[str, tuple[Code, int | None, bool, bool]] = {
    "mxfp4": ("e2m1", 32, False, False),
    "nvfp4": ("e2m1", 16, False, True),
    "int4": ("int4", 64, True, False),
    "int4 of 32": ("int4", 32, False, False),
    "int8": ("int8", None, False, False),
}


def matrix(kind: str, experts: int, n: int, k: int, generator: torch.Generator) -> PackedWeight:
    code, group, has_zeros, has_row_scale = KINDS[kind]
    group = k if group is None or k % group else group
    values = 256 if code == "int8" else 16

    def drawn(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    codes = drawn(0, values, experts, n, k).to(torch.uint8)
    shape = experts, n, k // group
    if code == "e2m1":  # of at most 4 bits
        scales = torch.ldexp(1.0 + drawn(0, 8 if has_row_scale else 1, *shape) / 8.0, drawn(-4, 2, *shape))
    else:
        scales = 0.5 + torch.rand(shape, generator=generator)
    norm = k**-0.5 / (70.0 if code == "int8" else 3.5)
    zeros = drawn(0, values, *shape) if has_zeros else None
    row_scale = torch.full((experts, n), norm) * (1 + torch.arange(experts)[:, None]) if has_row_scale else None
    if not has_row_scale and code != "e2m1":
        scales = scales * norm
    elif not has_row_scale:
        scales = scales * 2.0 ** round(torch.log2(torch.tensor(norm)).item())
    return pack(
        codes.to(DEVICE),
        scales.to(DEVICE, torch.bfloat16),
        None if zeros is None else zeros.to(DEVICE),
        None if row_scale is None else row_scale.to(DEVICE),
        group,
        code,
    )


def weights_of(kind: str, experts: int, seed: int = 0, gpt_oss: bool = False) -> PackedExpertWeights:
    generator = torch.Generator().manual_seed(seed)
    gate_up, down = (matrix(kind, experts, *shape, generator) for shape in ((2 * WIDTH, SIZE), (SIZE, WIDTH)))
    if not gpt_oss:
        return PackedExpertWeights(gate_up, down, activation=SWIGLU)
    biases = (torch.randn(experts, n, generator=generator).to(DEVICE) for n in (2 * WIDTH, SIZE))
    return PackedExpertWeights(gate_up, down, *biases, activation=GPT_OSS)


def meant(x: Tensor, chosen: Tensor, weight: Tensor, weights: PackedExpertWeights) -> tuple[Tensor, Tensor]:
    """The result in float64, and for each number the sum of its terms' sizes."""
    total = torch.zeros(x.shape[0], SIZE, dtype=torch.float64, device=DEVICE)
    size = torch.zeros_like(total)
    x = x.double()
    gate_up, down = (dequantize(one, torch.float32).double() for one in (weights.gate_up, weights.down))
    for row in range(x.shape[0]):
        for expert, share in zip(chosen[row].tolist(), weight[row].tolist(), strict=True):
            if expert < 0:
                continue
            inner = gate_up[expert] @ x[row]
            if weights.gate_up_bias is not None:
                inner = inner + weights.gate_up_bias[expert].double()
            hidden = weights.activation(*inner.chunk(2))
            out = down[expert] @ hidden
            if weights.down_bias is not None:
                out = out + weights.down_bias[expert].double()
            total[row] += share * out
            size[row] += share * (down[expert].abs() @ hidden.abs())
    return total, size


def options_of(
    weights: PackedExpertWeights, rows: int, slots: int, tiles: PackedExpertTiles | None = None
) -> GEMMOptions:
    sizes = weights.sizes(slots)
    tiles = tiles or packed_expert_tiles(rows, sizes)
    cells, tickets = partial_sizes(rows, sizes, tiles)
    workspace = Workspace.allocate(max(cells, 1), max(tickets, weights.num_experts, 64), torch.device(DEVICE))
    return GEMMOptions(workspace)


def check(weights: PackedExpertWeights, rows: int, k: int = 2, live: int | None = None, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    num_experts = weights.num_experts if weights.held is None else weights.held.total
    x = torch.randn(rows, SIZE, generator=generator).to(DEVICE, torch.bfloat16)
    logits = torch.randn(rows, num_experts, generator=generator).to(DEVICE)
    router = RouterLogits(logits, None, Routing(num_experts, k, normalise=True))
    options = options_of(weights, rows, k)
    out = torch.full((rows, SIZE), float("nan"), dtype=OUT, device=DEVICE)
    experts_triton.packed_expert_products(x, router, with_raised_scales(weights), options, out)
    assert options.workspace is not None and not options.workspace.tickets.any()
    chosen, weight = router.choose()
    if weights.held is not None:
        chosen = torch.where(
            (chosen >= weights.held.first) & (chosen < weights.held.end), chosen - weights.held.first, -1
        )
    expected, size = meant(x, chosen, weight, weights)
    # Inner activations and results are rounded to bfloat16 (2^-9), also each expert's result with more than 16 rows;
    # each inner number differs by its own sum's rounding. A wrong code or scale differs by far more.
    bound = 2.0**-7 * size + 2.0**-8 * expected.abs() + 1e-3
    error = (out.double() - expected).abs()
    assert (error <= bound).all(), (error / bound).max()
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 8, 17] if INTERPRETED else [1, 7, 13, 17, 64, 200])
def test_experts_of_few_bits(kind: str, rows: int) -> None:
    if INTERPRETED and rows < 17 and kind != "mxfp4" and (rows, kind) != (1, "nvfp4"):
        pytest.skip("interpreting takes seconds")
    check(weights_of(kind, 3 if INTERPRETED else 8, gpt_oss=kind == "mxfp4"), rows)


@pytest.mark.parametrize("rows", [3, 20])
def test_experts_of_other_ranks_add_nothing(rows: int) -> None:
    """A rank holds experts 2 to 4 of 5; some rows go to none of them."""
    check(replace(weights_of("mxfp4", 3), held=Span(2, 5, 5)), rows)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_a_row_of_many_depends_on_nothing_else(kind: str) -> None:
    """In one tile of 8 rows, or two."""
    weights = with_raised_scales(weights_of(kind, 3))
    rows, k = 19, 2
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, SIZE, generator=generator).to(DEVICE, torch.bfloat16)
    logits = torch.randn(rows, 3, generator=generator).to(DEVICE)
    options = replace(options_of(weights, rows, k), deterministic=True)

    def products(some: slice) -> Tensor:
        router = RouterLogits(logits[some].contiguous(), None, Routing(3, k, normalise=True))
        out = torch.empty(some.stop - some.start, SIZE, dtype=OUT, device=DEVICE)
        return experts_triton.packed_expert_products(x[some].contiguous(), router, weights, options, out)

    every = products(slice(0, rows))
    assert torch.equal(every[4:5], products(slice(4, 5))) and torch.equal(every[:17], products(slice(0, 17)))


def test_many_rows_in_spans_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_triton, "MAX_PARTIAL_BYTES", 1)
    check(weights_of("int4", 3), 17)


@pytest.mark.parametrize("splits,warps_k,warps_n", [(2, 2, 1), (3, 2, 4)])
def test_any_tiles_are_right(splits: int, warps_k: int, warps_n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that share a sum of inputs, or of experts; tiles past the last output."""
    tiles = PackedExpertTiles(
        PackedTiles(1, 2, warps_k, splits=splits), PackedTiles(1, warps_n, warps_k, splits=splits)
    )
    for module in (experts_triton, sys.modules[__name__]):
        monkeypatch.setattr(module, "packed_expert_tiles", lambda *_: tiles)
    check(weights_of("mxfp4", 3, gpt_oss=True), 1)


def test_scales_that_would_overflow_are_refused() -> None:
    weights = weights_of("mxfp4", 1)
    large = replace(weights, down=replace(weights.down, scales=torch.full_like(weights.down.scales, 2.0**18)))
    with pytest.raises(ValueError, match=r"scales of 4-bit floats are 2\^17 or more"):
        with_raised_scales(large)


@pytest.mark.parametrize("rows", [2, 18])
def test_a_layer_of_kernels_answers_as_its_reference(rows: int) -> None:
    """A rank that cuts blocks, with biases of which another rank adds those of outputs."""
    size, width = (64, 96) if INTERPRETED else (512, 96)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            experts = Experts(3, size, 2 * width, TPGroup(1, 4), 2, activation=GPT_OSS, biased=True)
            methods = [PackedExperts(experts.shape, GPT_OSS_MXFP4) for _ in range(2)]
    finally:
        torch.set_default_dtype(before)
    workspace = Workspace.allocate(*methods[1].workspace_size(), torch.device(DEVICE))
    for method, options in zip(methods, (GEMMOptions(), GEMMOptions(workspace)), strict=True):
        method.fill_dummy(torch.Generator(DEVICE).manual_seed(3))
        method.finish(options)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, size, generator=generator).to(DEVICE, torch.bfloat16)
    router = RouterLogits(torch.randn(rows, 3, generator=generator).to(DEVICE), None, Routing(3, 2, normalise=True))
    expected = methods[0].multiply(x, router)
    with kernels_of_operations():
        found = methods[1].multiply(x, router)
    # the interpreter cuts bfloat16 off: 2^-7 of each of two roundings
    torch.testing.assert_close(found.float(), expected.float(), rtol=2**-5, atol=2**-5 * float(expected.std()))
