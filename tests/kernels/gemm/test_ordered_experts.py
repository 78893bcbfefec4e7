"""Experts of deterministic engines: a row has the same bits for every number of rows, with sums in which the order of
additions matters. On a GPU, or under Triton's interpreter (TRITON_INTERPRET=1)."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed here")

from aerie.kernels.experts.fused import fused_workspace_size  # noqa: E402
from aerie.kernels.experts.fused_triton import TritonExperts  # noqa: E402
from aerie.kernels.experts.gated import GELU_TANH, GPT_OSS, SWIGLU, GatedActivation  # noqa: E402
from aerie.kernels.experts.grouped import experts_one_by_one  # noqa: E402
from aerie.kernels.experts.many_rows_triton import many_row_tiles  # noqa: E402
from aerie.kernels.experts.route import RouterLogits, Routing, TokenSlots  # noqa: E402
from aerie.kernels.experts.weights import ExpertWeights  # noqa: E402
from aerie.kernels.fp8.rows import Fp8Rows  # noqa: E402
from aerie.kernels.fp8.rows_triton import quantize_rows  # noqa: E402
from aerie.kernels.gemm.workspace import GEMMOptions, Workspace  # noqa: E402
from aerie.kernels.kv.stored_values import FP8  # noqa: E402
from aerie.kernels.packed import experts_triton  # noqa: E402
from aerie.kernels.packed.expert_tiles import packed_expert_workspace  # noqa: E402
from aerie.kernels.packed.experts import PackedExpertWeights, with_raised_scales  # noqa: E402
from aerie.kernels.packed.weight import PackedWeight, pack  # noqa: E402
from aerie.kernels.span import Span  # noqa: E402
from tests.support.kernels.triton_interpreter import DEVICE, INTERPRETED, MARKS  # noqa: E402

pytestmark = MARKS

HALF = torch.float16 if INTERPRETED else torch.bfloat16
ROWS = (1, 2, 16, 31, 65) if INTERPRETED else (1, 2, 3, 4, 5, 6, 7, 8, 16, 31, 64, 65, 127, 512, 2048)
EXPERTS, SLOTS = (2, 2) if INTERPRETED else (32, 4)
TERMS = torch.tensor([2.0**12, 2.0**-12, -(2.0**12), 2.0**-11, 2.0**-12])  # times 2^12: 2^24, 1, -2^24, 2, 1
# hidden size, width, activation, whether there are biases: gpt-oss-20b, Gemma 4 26B-A4B, a rank of Qwen3-30B-A3B
SHAPES = [(320, 72, GPT_OSS, True), (384, 320, GELU_TANH, False)]
if not INTERPRETED:
    SHAPES = [(2880, 2880, GPT_OSS, True), (2816, 704, GELU_TANH, False), (2048, 192, SWIGLU, False)]
    SHAPES += [(2048, 768, SWIGLU, False), (7168, 256, SWIGLU, False)]

Products = Callable[[int], Tensor]
"""Return the results of the last rows of all."""


def terms(k: int, step: int) -> Tensor:
    """Return [k] numbers, one in each `step` columns, whose small sum depends on the order of additions."""
    place = torch.arange(0, k // (5 * step) * 5 * step, step)
    return torch.zeros(k).index_put((place,), TERMS[place // step % 5])


def logits_of(rows: int, experts: int = EXPERTS) -> Tensor:
    return torch.randn(rows, experts, generator=torch.Generator().manual_seed(3)).to(DEVICE)


def router_of(rows: int, experts: int = EXPERTS) -> RouterLogits:
    last = logits_of(max(ROWS), experts)[-rows:].contiguous()
    return RouterLogits(last, None, Routing(experts, SLOTS, normalise=True))


def steep(
    size: int, width: int, biased: bool, activation: GatedActivation, seed: int = 0
) -> tuple[Tensor, ExpertWeights]:
    """Return x and 16-bit weights whose gate projections are sums of `terms`; the other numbers are whole or random."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator).to(DEVICE, HALF)

    x = terms(size, 64).repeat(max(ROWS), 1) * (1 + torch.arange(max(ROWS)) % 3)[:, None]
    gate_up = torch.zeros(EXPERTS, 2 * width, size)
    gate_up[:, :width] = 2.0**10 * (1 + torch.arange(width) % 5)[:, None]
    gate_up[:, width:, 0] = 2.0**-12
    biases = (random(EXPERTS, 2 * width), random(EXPERTS, size)) if biased else (None, None)
    weights = ExpertWeights(
        gate_up.to(DEVICE, HALF), random(EXPERTS, size, width), None, None, 0, None, *biases, activation
    )
    return x.to(DEVICE, HALF), weights


def products_of(x: Tensor | Fp8Rows, weights: ExpertWeights, deterministic: bool = True) -> Products:
    held = weights.held or Span.whole(EXPERTS)
    total = held.total
    cells, tickets = fused_workspace_size(held, 0, SLOTS, weights.size, weights.width)
    experts = TritonExperts(weights, Workspace.allocate(cells, tickets, DEVICE), deterministic, HALF)

    def products(rows: int) -> Tensor:
        mine = Fp8Rows(x.values[-rows:], x.scales[-rows:]) if isinstance(x, Fp8Rows) else x[-rows:]
        return experts.multiply(mine, router_of(rows, total), None)

    return products


def differing(products: Products, numbers: tuple[int, ...] = ROWS) -> list[int]:
    """Return the numbers of rows for which some row differs from the same row of all."""
    whole = products(max(numbers))
    assert torch.isfinite(whole).all() and whole.abs().max() > 0
    return [rows for rows in numbers if not torch.equal(products(rows), whole[-rows:])]


@pytest.mark.parametrize("size,width,activation,biased", SHAPES)
def test_a_row_has_the_same_bits_for_every_number_of_rows(
    size: int, width: int, activation: GatedActivation, biased: bool
) -> None:
    x, weights = steep(size, width, biased, activation)
    heights = {many_row_tiles(rows, weights.sizes(SLOTS), True).block_m for rows in ROWS}
    assert {16, 64} <= heights, "not every kind of block"
    assert differing(products_of(x, weights)) == []


@pytest.mark.parametrize("size,width,activation,biased", SHAPES)
def test_results_are_those_of_torch(size: int, width: int, activation: GatedActivation, biased: bool) -> None:
    """With biases, activations and widths that the kernels of few rows have not."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, HALF)

    gate_up, down = random(EXPERTS, 2 * width, size) / size**0.5, random(EXPERTS, size, width) / width**0.5
    biases = (random(EXPERTS, 2 * width), random(EXPERTS, size)) if biased else None
    weights = ExpertWeights(gate_up, down, None, None, 0, None, *(biases or (None, None)), activation)
    x = random(max(ROWS), size)
    for rows in (3, 65):
        chosen, weight = router_of(rows).choose()
        found = products_of(x, weights)(rows).double()
        wide = tuple(bias.float() for bias in biases) if biases else None
        expected = experts_one_by_one(
            x[-rows:].float(),
            chosen,
            weight,
            gate_up.float(),
            down.float(),
            activation,
            wide,  # type: ignore[arg-type]
        )
        assert float((found - expected).norm() / expected.norm()) < (6e-3 if not INTERPRETED else 1e-3)


@pytest.mark.parametrize("size,width", [(640, 128), (1024, 256)] if INTERPRETED else [(7168, 256)])
@pytest.mark.parametrize("held", [None, Span(0, EXPERTS, EXPERTS + 3)], ids=["all", "some"])
def test_rows_of_fp8_have_the_same_bits_for_every_number_of_rows(size: int, width: int, held: Span | None) -> None:
    """Groups of 128 inputs, whose scales are the terms. held: other ranks have experts that rows choose."""
    generator = torch.Generator().manual_seed(2)
    factors = terms(size // 128, 1).repeat(max(ROWS), 1) * (1 + torch.arange(max(ROWS)) % 3)[:, None]
    values = torch.zeros(max(ROWS), size)
    values[:, ::128] = 1.0
    x = Fp8Rows(values.to(DEVICE, FP8), factors.to(DEVICE))
    gate_up, scales = (
        torch.zeros(EXPERTS, 2 * width, size),
        torch.full((EXPERTS, 2 * width // 64, size // 128), 2.0**10),
    )
    gate_up[:, :width] = 1.0 + (torch.arange(width) % 5)[:, None]
    gate_up[:, width:, 0], scales[:, width // 64 :] = 1.0, 2.0**-12
    down = torch.randint(-3, 4, (EXPERTS, size, width), generator=generator)
    down_scales = 0.5 + torch.rand(EXPERTS, size // 64, width // 128, generator=generator)
    matrices = (gate_up.to(DEVICE, FP8), down.to(DEVICE, FP8), scales.to(DEVICE), down_scales.to(DEVICE))
    assert differing(products_of(x, ExpertWeights(*matrices, held=held))) == []


@pytest.mark.parametrize("num_shared", [0, 1])
def test_a_row_of_fp8_has_the_bits_that_it_has_beside_others(num_shared: int) -> None:
    """Random numbers, rows alone and in the tiles of few and many rows; and padding rows are zeros."""
    size, width, count = (1024, 128, 40) if INTERPRETED else (7168, 256, 700)
    generator = torch.Generator().manual_seed(5)

    def matrix(n: int, k: int) -> tuple[Tensor, Tensor]:
        values = torch.randn(EXPERTS + num_shared, n, k, generator=generator).mul(30)
        if INTERPRETED:  # where numpy adds in an order of its own
            values = values.clamp(-3, 3).round()
        scales = torch.rand(EXPERTS + num_shared, n // 64, k // 128, generator=generator) * 1e-3 + 1e-4
        return values.to(DEVICE, FP8), scales.to(DEVICE)

    (gate_up, gate_up_scales), (down, down_scales) = matrix(2 * width, size), matrix(size, width)
    weights = ExpertWeights(gate_up, down, gate_up_scales, down_scales, num_shared)
    x = torch.randn(count, size, generator=generator)
    rows_in = quantize_rows((x.round() if INTERPRETED else x).to(DEVICE, HALF), True)
    logits = torch.randn(count, EXPERTS, generator=generator).to(DEVICE)
    slots = torch.ones(count, dtype=torch.int64, device=DEVICE)
    slots[7] = 0
    cells = fused_workspace_size(Span.whole(EXPERTS), num_shared, SLOTS, size, width)
    experts = TritonExperts(weights, Workspace.allocate(*cells, DEVICE), True, HALF)

    def products(first: int, rows: int) -> Tensor:
        mine = Fp8Rows(rows_in.values[first : first + rows], rows_in.scales[first : first + rows])
        live = TokenSlots(slots[first : first + rows].contiguous(), 1)
        router = RouterLogits(
            logits[first : first + rows].contiguous(), None, Routing(EXPERTS, SLOTS, normalise=True), live
        )
        return experts.multiply(mine, router, None)

    whole = products(0, count)
    assert not whole[7].any() and whole[8].any()
    for first, rows in ((0, 1), (7, 1), (8, 1), (6, 2), (3, 9), (5, 16), (1, 17), (0, count - 1)):
        assert torch.equal(products(first, rows), whole[first : first + rows]), (first, rows)


def test_kernels_that_split_sums_by_the_number_of_rows_are_found() -> None:
    """Those of engines that are not deterministic."""
    x, weights = steep(1920, 128, False, SWIGLU)
    assert differing(products_of(x, weights)) == []
    found = differing(products_of(x, weights, deterministic=False))
    assert found and max(found) <= 16


def packed(code: str, n: int, k: int, value: Tensor) -> PackedWeight:
    """Return experts' weights, value: [EXPERTS, n, k] of 0 or 1, times 2^10."""
    one, zero = {"e2m1": (2, 0), "int4": (9, 8)}[code]
    scales = torch.full((EXPERTS, n, k // 32), 2.0**10)
    codes = torch.where(value > 0, one, zero).to(torch.uint8)
    return pack(codes.to(DEVICE), scales.to(DEVICE, torch.bfloat16), None, None, 32, code)  # type: ignore[arg-type]


@pytest.mark.parametrize("code", ["e2m1", "int4"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_rows_of_few_bits(code: str, deterministic: bool) -> None:
    """Without `deterministic`, other tiles for few rows add in another order, which is found."""
    size, width = (640, 64) if INTERPRETED else (2880, 320)
    x = terms(size, 64).repeat(max(ROWS), 1) * (1 + torch.arange(max(ROWS)) % 3)[:, None]
    gate_up = torch.ones(EXPERTS, 2 * width, size)
    gate_up[:, width:, 1:] = 0
    down = torch.randint(0, 2, (EXPERTS, size, width), generator=torch.Generator().manual_seed(4))
    activation = replace(GPT_OSS, limit=None)
    matrices = packed(code, 2 * width, size, gate_up), packed(code, size, width, down)
    weights = PackedExpertWeights(*matrices, activation=activation)
    workspace = Workspace.allocate(*packed_expert_workspace(weights.sizes(SLOTS)), DEVICE)
    options, ready = GEMMOptions(workspace, deterministic), with_raised_scales(weights)

    def products(rows: int) -> Tensor:
        mine = x[-rows:].to(DEVICE, torch.bfloat16)
        return experts_triton.packed_expert_products(mine, router_of(rows), ready, options)

    found = differing(products, (1, 17) if INTERPRETED else ROWS)
    assert found == [] if deterministic else 1 in found


def test_partial_logits_are_added_in_their_order() -> None:
    """As the kernels of routing add them."""
    parts = torch.tensor([2.0**24, 1.0, -(2.0**24), 2.0, 1.0])[:, None, None].repeat(3, 700, 16).to(DEVICE)
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    for rows in (1, 7, 700):
        router = RouterLogits(parts[:, :rows].contiguous(), None, Routing(16, 2))
        assert torch.equal(router.logits(), expected[:rows])
