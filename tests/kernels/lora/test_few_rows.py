"""Products of few rows that add their adapters' part in their own launch: on a GPU, or under Triton's interpreter,
which `tests/kernels/test_triton_interpreter.py` starts in a process of its own."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed here")

from aerie.kernels.gemm.skinny_triton import SkinnyGEMM  # noqa: E402
from aerie.kernels.gemm.tiles import MAX_ADAPTED_ROWS  # noqa: E402
from aerie.kernels.gemm.workspace import GEMMOptions, Workspace  # noqa: E402
from aerie.kernels.lora.product import LoraTables, RowAdapters, add_lora  # noqa: E402
from aerie.kernels.norm.norm import silu_mul  # noqa: E402
from aerie.workers.layers.forward_context import ForwardContext  # noqa: E402
from aerie.workers.layers.linear import ReplicatedLinear  # noqa: E402
from aerie.workers.lora import layers  # noqa: E402
from aerie.workers.lora.layers import AdaptedMethod, AdapterRows  # noqa: E402
from tests.kernels.ops.lora_cases import lora_tables  # noqa: E402
from tests.support.kernels.triton_interpreter import DEVICE, INTERPRETED, MARKS, kernels_of_operations  # noqa: E402

pytestmark = MARKS
DTYPE = torch.float16
ERROR = 6e-4  # one rounding to 11 bits: 2^-12 of a value at most; gated products round four times
CASES = (  # rows, max_loras, rank, inputs, borders of parts, gated
    (1, 1, 16, 256, (0, 64, 128, 192), False),
    (7, 3, 16, 192, (0, 128, 192), False),
    (16, 4, 48, 512, (0, 64), False),
    (20, 9, 16, 320, (0, 128), False),
    (13, 9, 32, 320, (0, 128), False),
    (30, 5, 32, 192, (0, 64, 128), False),
    (9, 3, 64, 192, (0, 128, 192), False),
    (64, 3, 32, 256, (0, 64, 128), False),
    (50, 2, 16, 128, (0, 64), False),
    (5, 2, 16, 128, (0, 4288, 8576), True),
    *(() if INTERPRETED else ((8, 4, 16, 4096, (0, 4096, 5120, 6144), False), (1, 1, 16, 14336, (0, 4096), False))),
    *(() if INTERPRETED else ((32, 32, 64, 4096, (0, 14336, 28672), True), (64, 8, 16, 4096, (0, 14336, 28672), True))),
)


class Layer:
    """A random weight with tables. indices: adapters of the rows; every third row has none."""

    def __init__(self, rows: int, max_loras: int, rank: int, inputs: int, parts: tuple[int, ...]) -> None:
        self.parts, generator = parts, torch.Generator().manual_seed(rows)
        weight = torch.randn(parts[-1], inputs, generator=generator) / inputs**0.5
        self.weight = weight.to(DEVICE, DTYPE)
        self.gemm = SkinnyGEMM(self.weight, Workspace.create([(parts[-1], inputs)], DEVICE))
        self.tables = lora_tables(max_loras, rank, inputs, parts, parts[-1], DTYPE, DEVICE)
        self.x = torch.randn(rows, 2 * inputs, generator=generator).to(DEVICE, DTYPE)[:, :inputs]
        chosen = torch.randint(0, max_loras, (rows,), generator=generator, dtype=torch.int32)
        self.indices = torch.where(torch.arange(rows) % 3 == 2, -1, chosen).to(DEVICE)
        self.counters = torch.zeros(8, 4, dtype=torch.int32, device=DEVICE)

    def multiply(self, gated: bool, bias: Tensor | None = None, number: int = 0) -> Tensor | None:
        adapters = RowAdapters(self.tables, self.indices, self.counters[number])
        return self.gemm.multiply_adapted(self.x, bias, None, adapters, gated)

    def expected(self, bias: Tensor | None = None) -> Tensor:
        """In float64, before the gate."""
        x, y = self.x.double(), self.x.double() @ self.weight.double().T
        rank = self.tables.max_rank
        for row, index in enumerate(self.indices.tolist()):
            for part, (first, end) in enumerate(zip(self.parts, self.parts[1:], strict=False)):
                if index >= 0:
                    inner = self.tables.down[index, rank * part : rank * part + rank].double() @ x[row]
                    y[row, first:end] += self.tables.up[index, first:end].double() @ inner
        return y if bias is None else y + bias.double()


@pytest.mark.parametrize(("rows", "max_loras", "rank", "inputs", "parts", "gated"), CASES)
def test_a_product_adds_each_rows_adapter(
    rows: int, max_loras: int, rank: int, inputs: int, parts: tuple[int, ...], gated: bool
) -> None:
    layer = Layer(rows, max_loras, rank, inputs, parts)
    bias = None if gated or rows % 2 else torch.randn(parts[-1]).to(DEVICE, DTYPE)
    out, expected = layer.multiply(gated, bias), layer.expected(bias)
    assert out is not None
    if gated:
        expected = silu_mul.reference(expected)
    alone = layer.gemm.multiply_gated(layer.x) if gated else layer.gemm.multiply(layer.x, bias, None)
    assert float((out.double() - expected).norm() / expected.norm()) < ERROR * (2 if gated else 1)
    assert torch.equal(out[layer.indices < 0], alone[layer.indices < 0]), "rows without an adapter"
    assert not torch.equal(out, alone) and int(layer.gemm.workspace.tickets.abs().sum()) == 0
    assert torch.equal(layer.multiply(gated, bias, 1), out), "equal inputs give equal bits"


def test_passes_share_counters_but_their_products_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes of a layer that runs twice in each, then more products than there are counters: those of the two
    launches have the same results, but for roundings."""
    rows, generator = 6, torch.Generator().manual_seed(5)
    layer = ReplicatedLinear(128, 192).to(DEVICE, DTYPE)
    layer.method.fill_dummy(torch.Generator(DEVICE).manual_seed(1))
    tables = lora_tables(3, 16, 128, (0, 64, 192), 192, DTYPE, DEVICE)
    of_slot = torch.tensor([2, -1, 0, 1, -1], device=DEVICE)
    index = AdapterRows(of_slot)
    slots = torch.tensor([0, 0, 1, 2, 3, 3], dtype=torch.int32, device=DEVICE)
    context = cast(
        ForwardContext, SimpleNamespace(row_slots=slots, last=None, expanded=None, attending_rows=lambda each: each)
    )
    with kernels_of_operations() if INTERPRETED else nullcontext():
        layer.finish(GEMMOptions(Workspace.create([(192, 128)], DEVICE)))
        layer.method = AdaptedMethod(layer.method, tables, index)
        for _ in range(2):
            index.enter(context, True)
            for _ in range(2):
                x = torch.randn(rows, 128, generator=generator).to(DEVICE, DTYPE)
                y = layer.method.inner.multiply(x, None)
                expected = add_lora.reference(y, x, tables, of_slot[slots.long()].int())
                torch.testing.assert_close(layer(x), expected, rtol=0, atol=2e-3)
            assert index._counters[:3, 0].tolist() == [32, 32, 0], "programs that computed A x, in each launch"
        monkeypatch.setattr(layers, "MAX_PRODUCTS", 2)
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=2e-3)
        index.enter(context, False)
        assert torch.equal(layer(x), layer.method.inner.multiply(x, None))


def test_rows_without_adapters_are_not_hurt_by_a_broken_one() -> None:
    layer = Layer(6, 2, 16, 128, (0, 64, 128))
    layer.tables.down[0] = torch.nan
    layer.indices = torch.tensor([-1, 0, 1, -1, 0, 1], dtype=torch.int32, device=DEVICE)
    out = layer.multiply(False)
    assert out is not None
    assert out.isnan().any(1).tolist() == [False, True, False, False, True, False]


def test_what_the_launch_cannot_add_is_left_to_others() -> None:
    assert Layer(MAX_ADAPTED_ROWS + 56, 1, 16, 128, (0, 64)).multiply(False) is None
    assert Layer(40, 1, 16, 128, (0, 64)).multiply(False) is None, "cuBLAS multiplies these rows"
    assert Layer(4, 1, 16, 128, (0, 72, 144)).multiply(False) is None, "a tile with two parts"
    assert Layer(4, 1, 16, 128, (0, 64, 128)).multiply(True) is None, "few gates"


def test_a_table_of_another_layer_is_our_bug() -> None:
    layer = Layer(4, 1, 16, 128, (0, 64))
    layer.tables = LoraTables(layer.tables.down[:, :, :64].contiguous(), layer.tables.up, (0, 64))
    with pytest.raises(AssertionError):
        layer.multiply(False)
