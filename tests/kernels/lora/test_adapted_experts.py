"""Experts with adapters by our kernels, against what weights and adapters mean. On a GPU, or interpreted."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed here")

from aerie.kernels.experts.adapted.product import ExpertAdapters, ExpertLoraTables  # noqa: E402
from aerie.kernels.experts.adapted.sorted_rows_triton import adapted_row_experts, adapted_row_tiles  # noqa: E402
from aerie.kernels.experts.fused_triton import TritonExperts  # noqa: E402
from aerie.kernels.experts.route import RouterLogits, Routing  # noqa: E402
from aerie.kernels.experts.route_triton import route  # noqa: E402
from aerie.kernels.experts.weights import ExpertWeights  # noqa: E402
from aerie.kernels.fp8.rows import dequantized_rows  # noqa: E402
from aerie.kernels.fp8.rows_triton import quantize_rows  # noqa: E402
from aerie.kernels.gemm.workspace import Workspace  # noqa: E402
from aerie.kernels.span import Span  # noqa: E402
from tests.kernels.ops.lora_cases import expert_tables  # noqa: E402
from tests.kernels.products.test_expert_kernels import HALF, tickets, token_slots, weights_of  # noqa: E402
from tests.support.kernels.triton_interpreter import DEVICE, MARKS  # noqa: E402
from tests.support.slow import slow  # noqa: E402

pytestmark = MARKS
ROUTING = Routing(6, 2, normalise=True)


def with_adapter(y: Tensor, x: Tensor, tables: ExpertLoraTables, adapter: int, expert: int) -> Tensor:
    """Return y with the adapter's part. x: [size]."""
    rank, y = tables.max_rank, y.clone()
    for part, (first, end) in enumerate(zip(tables.parts, tables.parts[1:], strict=False)):
        down = tables.down[adapter, expert, part * rank : (part + 1) * rank].float()
        y[first:end] += tables.up[adapter, expert, first:end].float() @ (down @ x.float())
    return y


@pytest.mark.parametrize(
    ("kind", "rows", "held"),
    [("half", 5, None), ("group", 5, Span(1, 4, 6)), *slow(("half", 70, Span(2, 3, 6)), ("channel", 70, None))],
)
def test_each_row_gets_experts_with_its_adapter(kind: str, rows: int, held: Span | None) -> None:
    """The last row is padding. held: experts of this rank."""
    count, first = (6, 0) if held is None else (held.size, held.first)
    weights, gate_up, down = weights_of(kind, count, 0, 7)
    weights = ExpertWeights(**{**vars(weights), "held": held})
    size, width, generator = weights.size, weights.width, torch.Generator().manual_seed(rows)
    tables = (
        expert_tables(2, count, 16, size, (0, width, 2 * width), HALF, DEVICE),
        expert_tables(2, count, 16, width, (0, size), HALF, DEVICE),
    )
    index = (torch.arange(rows) % 3 - 1).int().to(DEVICE)
    logits = torch.randn(rows, 6, generator=generator).to(DEVICE)
    x = torch.randn(rows, size, generator=generator).to(DEVICE, HALF)
    x[-1] = torch.nan if kind == "half" else 1.0
    live = token_slots(torch.arange(rows) < rows - 1)
    routed = route(RouterLogits(logits, None, ROUTING, live), 0, tickets(), False, held)
    out = torch.full((rows, size), torch.nan, device=DEVICE, dtype=HALF)
    tiles = adapted_row_tiles(rows, weights.sizes(2))
    adapters = ExpertAdapters(*tables, index)
    assert adapted_row_experts(x, routed, weights, adapters, tiles, out) is out
    assert routed.count is not None and not routed.count.any() and not out[-1].any()
    meant = dequantized_rows(quantize_rows(x, weights.by_group)) if weights.in_fp8 else x.float()
    chosen, weight = RouterLogits(logits, None, ROUTING).choose()
    for row in range(rows - 1):
        expected, adapter = torch.zeros(size, device=DEVICE), int(index[row])
        for expert, share in zip((chosen[row] - first).tolist(), weight[row].tolist(), strict=True):
            if not 0 <= expert < count:
                continue
            inner = gate_up[expert] @ meant[row]
            inner = inner if adapter < 0 else with_adapter(inner, x[row], tables[0], adapter, expert)
            hidden = torch.nn.functional.silu(inner[:width]) * inner[width:]
            part = down[expert] @ hidden
            expected += share * (part if adapter < 0 else with_adapter(part, hidden, tables[1], adapter, expert))
        error = (out[row].float() - expected).norm()
        assert float(error) <= (0.05 if weights.in_fp8 else 0.01) * float(expected.norm()) + 1e-6, row


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["half", "group"])
@pytest.mark.parametrize("rows", [1, 8, 100])
def test_a_captured_pass_follows_its_rows_adapters(kind: str, rows: int) -> None:
    """One capture for all adapters. A row without an adapter gets what all rows without get."""
    weights, _, _ = weights_of(kind, 6, 0, 7)
    size, width, generator = weights.size, weights.width, torch.Generator().manual_seed(rows)
    gates = expert_tables(2, 6, 16, size, (0, width, 2 * width), HALF, DEVICE)
    downs = expert_tables(2, 6, 16, width, (0, size), HALF, DEVICE)
    index = torch.full((rows,), -1, dtype=torch.int32, device=DEVICE)
    experts = TritonExperts(weights, Workspace.allocate(1, 6, DEVICE), False, HALF)
    router = RouterLogits(torch.randn(rows, 6, generator=generator).to(DEVICE), None, ROUTING)
    x, adapters = torch.randn(rows, size, generator=generator).to(DEVICE, HALF), ExpertAdapters(gates, downs, index)
    without = experts.multiply_adapted(x, router, adapters, None).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts.multiply_adapted(x, router, adapters, None)
    for shift in range(3):
        index.copy_((torch.arange(rows) + shift) % 3 - 1)
        graph.replay()
        assert torch.equal(out, experts.multiply_adapted(x, router, adapters, None))
        is_adapted = index >= 0
        assert torch.equal(out[~is_adapted], without[~is_adapted])
        assert not (out[is_adapted] == without[is_adapted]).all(1).any()
