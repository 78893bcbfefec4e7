"""CUDA kernels of one row against float64: products with 16-bit weights, and MXFP4 experts. They need a Hopper GPU."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed here")

from aerie.kernels.capability import num_multiprocessors  # noqa: E402
from aerie.kernels.experts.gated import GELU_TANH, GPT_OSS, SWIGLU, GatedActivation  # noqa: E402
from aerie.kernels.experts.route import RouterLogits, Routing, TokenSlots  # noqa: E402
from aerie.kernels.gemm.choice import choose_gemm  # noqa: E402
from aerie.kernels.gemm.one_row_cuda import OneRowGEMM, one_row  # noqa: E402
from aerie.kernels.gemm.workspace import GEMMOptions, Workspace  # noqa: E402
from aerie.kernels.packed.cuda.gated_mlp_cuda import packed_expert_products as by_cuda  # noqa: E402
from aerie.kernels.packed.cuda.gated_mlp_tiles import one_row_tiles  # noqa: E402
from aerie.kernels.packed.experts import PackedExpertWeights, packed_expert_products, with_raised_scales  # noqa: E402
from aerie.kernels.packed.weight import dequantize  # noqa: E402
from aerie.kernels.span import Span  # noqa: E402
from tests.kernels.gemm.hopper import HOPPER_HERE  # noqa: E402
from tests.kernels.products.test_packed_experts import matrix  # noqa: E402

DEVICE = torch.device("cuda")

pytestmark = HOPPER_HERE


@pytest.mark.parametrize("n,k", [(5120, 2880), (2880, 4096), (300, 7040), (2048, 96)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_one_row_are_those_of_float64(n: int, k: int, dtype: torch.dtype) -> None:
    """Blocks with one row of W more than others, tiles of rows that are not full, and steps that not all warps have."""
    weight, bias = torch.randn(n, k, device=DEVICE).to(dtype), torch.randn(n, device=DEVICE).to(dtype)
    x = torch.randn(1, k, device=DEVICE).to(dtype)
    for b in (bias, None):
        expected = x.double() @ weight.double().T + (0.0 if b is None else b.double())
        out = torch.full((1, n), float("nan"), dtype=dtype, device=DEVICE)
        one_row(x, weight, b, out)
        # one rounding, of bfloat16 1.7e-3 in the mean
        assert float((out.double() - expected).norm() / expected.norm()) < 2.5e-3
        assert torch.equal(out, one_row(x, weight, b, torch.empty_like(out))), "equal inputs, other bits"


def test_only_one_row_is_multiplied_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(2880, 4096, device=DEVICE).bfloat16()
    gemm = choose_gemm(weight, GEMMOptions(Workspace.create([(2880, 4096)], DEVICE)))
    assert isinstance(gemm, OneRowGEMM)
    x = torch.randn(3, 4096, device=DEVICE).bfloat16()
    for rows in (x, x[:1], x[:1].expand(1, -1)):
        expected = rows.double() @ weight.double().T
        assert float((gemm.multiply(rows, None, None).double() - expected).norm() / expected.norm()) < 2.5e-3
    wide = torch.empty(1, 2880, dtype=torch.float32, device=DEVICE)
    assert gemm.multiply(x[:1], None, wide) is wide and bool(wide.isfinite().all())


def experts_of(num: int, size: int, width: int, activation: GatedActivation, biased: bool) -> PackedExpertWeights:
    generator = torch.Generator().manual_seed(size)
    gate_up = matrix("mxfp4", num, 2 * width, size, generator)
    down = matrix("mxfp4", num, size, width, generator)
    if not biased:
        return PackedExpertWeights(gate_up, down, activation=activation)
    biases = [torch.randn(num, n, generator=generator).to(DEVICE) for n in (2 * width, size)]
    return PackedExpertWeights(gate_up, down, *biases, activation=activation)


def meant(x: Tensor, router: RouterLogits, weights: PackedExpertWeights) -> tuple[Tensor, Tensor]:
    """The result in float64, and for each number the sum of its terms' sizes."""
    first = 0 if weights.held is None else weights.held.first
    total = torch.zeros(1, weights.size, dtype=torch.float64, device=DEVICE)
    size = torch.zeros_like(total)
    chosen, weight = router.choose()
    for expert, share in zip((chosen[0] - first).tolist(), weight[0].tolist(), strict=True):
        if not 0 <= expert < weights.num_experts:
            continue
        gate_up, down = (
            dequantize(each.expert(expert), torch.float32).double() for each in (weights.gate_up, weights.down)
        )
        inner = x.double() @ gate_up.T
        if weights.gate_up_bias is not None:
            inner += weights.gate_up_bias[expert]
        hidden = weights.activation(*inner.chunk(2, -1))
        total += share * (hidden @ down.T)
        size += share * (hidden.abs() @ down.abs().T)
        if weights.down_bias is not None:
            total += share * weights.down_bias[expert]
    return total, size


# experts, of a row, size, width, activation, biases
KINDS = {
    "gpt-oss": (6, 4, 2880, 2880, GPT_OSS, True),
    "units of four chunks": (5, 3, 2048, 1536, SWIGLU, False),
    "units of two chunks": (4, 4, 1408, 1408, GELU_TANH, True),
}


def options_of(weights: PackedExpertWeights, slots: int) -> GEMMOptions:
    tiles = one_row_tiles(weights.sizes(slots), num_multiprocessors(DEVICE))
    assert tiles is not None, "served"
    workspace = Workspace.allocate(*tiles.workspace, DEVICE)
    workspace.part.fill_(float("nan"))
    return GEMMOptions(workspace)


def check(x: Tensor, router: RouterLogits, weights: PackedExpertWeights, options: GEMMOptions) -> None:
    expected, size = meant(x, router, weights)
    out = torch.full_like(x, float("nan"))
    by_cuda(x, router, with_raised_scales(weights), options, out)
    # inner activations and the result are rounded to bfloat16, each inner number by its own sum's rounding
    bound = 2.0**-7 * size + 2.0**-8 * expected.abs() + 1e-3
    assert ((out.double() - expected).abs() <= bound).all()
    assert options.workspace is not None and not options.workspace.tickets.any()


@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_one_row_are_those_of_float64(kind: str) -> None:
    num, slots, size, width, activation, biased = KINDS[kind]
    weights = experts_of(num, size, width, activation, biased)
    options = options_of(weights, slots)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(1, size, generator=generator).to(DEVICE, torch.bfloat16)
        logits = torch.randn(1, num, generator=generator).to(DEVICE)
        check(x, RouterLogits(logits, None, Routing(num, slots, normalise=True)), weights, options)


def test_equal_rows_give_equal_bits_in_a_graph() -> None:
    """Many launches after one another, each of which begins before the one before has ended."""
    num, slots, size, width, activation, biased = KINDS["gpt-oss"]
    weights = with_raised_scales(experts_of(num, size, width, activation, biased))
    options = options_of(weights, slots)
    x = torch.randn(1, size, device=DEVICE).bfloat16()
    routers = [
        RouterLogits(torch.randn(1, num, device=DEVICE), None, Routing(num, slots, normalise=True)) for _ in range(20)
    ]
    expected = [packed_expert_products(x, router, weights, options) for router in routers]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [packed_expert_products(x, router, weights, options) for router in routers]
    for _ in range(50):
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_experts_of_other_ranks_and_padding_rows_add_nothing() -> None:
    num, slots, size, width, activation, biased = KINDS["gpt-oss"]
    weights = experts_of(num, size, width, activation, biased)
    options = options_of(weights, slots)
    x = torch.randn(1, size, device=DEVICE).bfloat16()
    for first in (0, 2, 6):  # all of the row's experts are here, some, or none
        held = replace(weights, held=Span(first, first + num, 2 * num))
        logits = torch.arange(2 * num, 0, -1.0, device=DEVICE)[None]
        check(x, RouterLogits(logits, None, Routing(2 * num, slots, normalise=True)), held, options)
    live = TokenSlots(torch.tensor([15], device=DEVICE), 16)
    router = RouterLogits(torch.randn(1, num, device=DEVICE), None, Routing(num, slots, normalise=True), live)
    assert not by_cuda(x, router, with_raised_scales(weights), options, torch.full_like(x, float("nan"))).any()


def test_deterministic_engines_and_more_rows_use_other_kernels() -> None:
    """A row's result with deterministic tiles is that of any number of rows."""
    num, slots, size, width, activation, biased = KINDS["units of four chunks"]
    weights = with_raised_scales(experts_of(num, size, width, activation, biased))
    options = replace(options_of(weights, slots), deterministic=True)
    x = torch.randn(3, size, device=DEVICE).bfloat16()
    logits = torch.randn(3, num, device=DEVICE)

    def result(rows: slice) -> Tensor:
        router = RouterLogits(logits[rows].contiguous(), None, Routing(num, slots, normalise=True))
        return packed_expert_products(x[rows], router, weights, options)

    assert torch.equal(result(slice(0, 3))[1:2], result(slice(1, 2)))
