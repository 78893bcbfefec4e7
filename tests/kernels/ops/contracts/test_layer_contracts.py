"""A CPU refuses inputs of linear layers, of experts and of all-reduces that a GPU's kernels would refuse or misread."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from aerie.kernels.collectives.all_reduce import ONE_SHOT, one_shot_all_reduce
from aerie.kernels.experts.grouped import check_experts
from aerie.kernels.experts.route import MAX_LISTED, Routed, RouterLogits, Routing, TokenSlots
from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows, quantize_rows
from aerie.kernels.gemm.choice import TorchGEMM, choose_gemm
from aerie.kernels.gemm.workspace import GEMMOptions, Workspace
from aerie.kernels.kv.stored_values import FP8
from aerie.kernels.packed.experts import packed_expert_products
from aerie.kernels.span import Span
from aerie.workers.distributed.custom_all_reduce import CustomAllReduce, Limits, region_bytes
from aerie.workers.layers.experts_method import DenseExperts, ExpertsShape, UnquantizedExperts
from aerie.workers.layers.linear_method import DenseLinearMethod, LinearShape, UnquantizedLinearMethod
from aerie.workers.quantization.floats import CHANNEL, TENSOR, block_scheme
from aerie.workers.quantization.fp8_linear import Fp8Experts, Fp8Linear
from tests.kernels.ops.contracts.test_contracts import strided
from tests.kernels.ops.packed_cases import arguments as packed_arguments

CPU, ROWS, SIZE, WIDTH = torch.device("cpu"), 3, 128, 128
SCHEMES = {"block": block_scheme((128, 128)), "channel": CHANNEL, "tensor": TENSOR}
ROUTING = Routing(4, 2, has_bias=True)


def unaligned(*shape: int) -> Tensor:
    """Contiguous zeros that begin 4 bytes after an address aligned to 16."""
    return torch.zeros(torch.Size(shape).numel() + 4)[1:-3].view(shape)


def router(**changes: Tensor | TokenSlots | Routed | None) -> RouterLogits:
    slots = TokenSlots(torch.zeros(ROWS, dtype=torch.int64), 0)
    return replace(RouterLogits(torch.zeros(ROWS, 4), torch.zeros(4), ROUTING, slots, torch.ones(4)), **changes)


def chosen(experts: Tensor, weights: Tensor) -> RouterLogits:
    return router(routed=Routed(experts, weights))


WRONG_ROWS: dict[str, Tensor] = {
    "strided": strided(ROWS, SIZE),
    "columns of a wider matrix": torch.zeros(ROWS, 2 * SIZE)[:, :SIZE],
    "another size": torch.zeros(ROWS, SIZE + 16),
    "another dimension": torch.zeros(1, ROWS, SIZE),
    "another dtype": torch.zeros(ROWS, SIZE, dtype=torch.float16),
    "unaligned": unaligned(ROWS, SIZE),
}
WRONG_ROUTERS: dict[str, RouterLogits] = {
    "strided logits": router(values=strided(ROWS, 4)),
    "logits of 16 bits": router(values=torch.zeros(ROWS, 4).half()),
    "logits of other rows": router(values=torch.zeros(ROWS + 1, 4)),
    "a strided bias": router(bias=strided(4)),
    "scales of 16 bits": router(expert_scales=torch.ones(4).half()),
    "slots of int32": router(live=TokenSlots(torch.zeros(ROWS, dtype=torch.int32), 0)),
    "slots of other rows": router(live=TokenSlots(torch.zeros(ROWS + 1, dtype=torch.int64), 0)),
    "strided slots": router(live=TokenSlots(torch.zeros(2 * ROWS, dtype=torch.int64)[::2], 0)),
    "logits of four dimensions": router(values=torch.zeros(1, 1, ROWS, 4)),
    "no bias": router(bias=None),
    "a bias of other experts": router(bias=torch.zeros(5)),
    "chosen experts of other rows": chosen(torch.zeros(ROWS + 1, 2, dtype=torch.int32), torch.ones(ROWS + 1, 2)),
    "strided experts": chosen(torch.zeros(ROWS, 4, dtype=torch.int32)[:, ::2], torch.ones(ROWS, 2)),
    "strided weights": chosen(torch.zeros(ROWS, 2, dtype=torch.int32), torch.ones(ROWS, 4)[:, ::2]),
    "weights of 16 bits": chosen(torch.zeros(ROWS, 2, dtype=torch.int32), torch.ones(ROWS, 2).half()),
    "fewer weights than experts": chosen(torch.zeros(ROWS, 2, dtype=torch.int32), torch.ones(ROWS, 1)),
}
WRONG_RESULTS: dict[str, Tensor] = {
    "strided": strided(ROWS, SIZE),
    "another dtype": torch.zeros(ROWS, SIZE, dtype=torch.float16),
    "another number of rows": torch.zeros(ROWS + 1, SIZE),
}


def experts(kind: str) -> DenseExperts:
    """Experts in float32, or in FP8 that a CPU dequantises."""
    shape = ExpertsShape(
        Span.whole(4),
        LinearShape.stacked([(name, Span.whole(WIDTH)) for name in ("gate_proj", "up_proj")], Span.whole(SIZE)),
        LinearShape.stacked([("down_proj", Span.whole(SIZE))], Span.whole(WIDTH)),
        experts_per_token=2,
    )
    made = UnquantizedExperts(shape) if kind == "float32" else Fp8Experts(shape, SCHEMES[kind])
    made.fill_dummy(torch.Generator().manual_seed(0))
    made.finish(GEMMOptions())
    return made


@pytest.mark.parametrize("kind", ["float32", *SCHEMES])
def test_experts_refuse_what_their_kernels_refuse(kind: str) -> None:
    layer, x = experts(kind), torch.ones(ROWS, SIZE)
    out = torch.empty(ROWS, SIZE)
    assert layer.multiply(x, router(), out) is out
    for wrong in WRONG_ROWS.values():
        with pytest.raises(AssertionError):
            layer.multiply(wrong, router())
    for other in WRONG_ROUTERS.values():
        with pytest.raises(AssertionError):
            layer.multiply(x, other)
    for result in WRONG_RESULTS.values():
        with pytest.raises(AssertionError, match="out"):
            layer.multiply(x, router(), result)
    with pytest.raises(AssertionError, match="FP8"):
        layer.multiply(quantize_rows(x, True), router())


def test_experts_of_few_bits_refuse_what_their_kernels_refuse() -> None:
    x, logits, weights, options = packed_arguments(ROWS, CPU)
    wrong = [
        torch.stack((x, x), -1)[..., 0],
        x[:, :64],
        x[None],
        torch.cat((x, x)).view(-1)[1 : 1 + x.numel()].view(x.shape),
    ]
    for rows in wrong:
        with pytest.raises(AssertionError):
            packed_expert_products(rows, logits, weights, options)
    with pytest.raises(AssertionError):
        packed_expert_products(x, replace(logits, values=logits.values.half()), weights, options)
    with pytest.raises(AssertionError, match="out"):
        packed_expert_products(x, logits, weights, options, torch.empty(ROWS, SIZE))


def linear(kind: str) -> DenseLinearMethod:
    """A weight in float32, or in FP8 that stays in FP8: its kernels run on GPUs alone, its checks everywhere."""
    shape = LinearShape.stacked([("", Span.whole(SIZE))], Span.whole(SIZE))
    made = UnquantizedLinearMethod(shape) if kind == "float32" else Fp8Linear(shape, SCHEMES[kind])
    made.fill_dummy(torch.Generator().manual_seed(0))
    workspace = None if kind == "float32" else Workspace.allocate(1, 1, CPU)
    made.finish(GEMMOptions(workspace, fp8=workspace is not None))
    return made


@pytest.mark.parametrize("kind", ["float32", *SCHEMES])
def test_linear_layers_refuse_what_their_kernels_refuse(kind: str) -> None:
    if kind != "float32":
        pytest.importorskip("triton", reason="triton is not installed here")
    layer, x = linear(kind), torch.ones(ROWS, SIZE)
    if kind == "float32":
        out = torch.empty(ROWS, SIZE)
        assert layer.multiply(x, torch.zeros(SIZE), out) is out
        assert layer.multiply(WRONG_ROWS["columns of a wider matrix"], None).shape == (ROWS, SIZE)
    for name, wrong in WRONG_ROWS.items():
        if name != "columns of a wider matrix":  # aligned rows of any stride
            for multiply in (lambda x: layer.multiply(x, None), layer.multiply_gated):
                with pytest.raises(AssertionError):
                    multiply(wrong)
    for bias in (strided(SIZE), torch.zeros(SIZE + 1)):
        with pytest.raises(AssertionError):
            layer.multiply(x, bias)
    for result in WRONG_RESULTS.values():
        with pytest.raises(AssertionError):
            layer.multiply(x, None, result)


def test_torch_multiplies_by_a_weight_without_inputs() -> None:
    pytest.importorskip("triton", reason="triton is not installed here")
    options = GEMMOptions(Workspace.allocate(1, 1, CPU))
    assert type(choose_gemm(torch.zeros(16, 64), options)) is not TorchGEMM
    assert type(choose_gemm(torch.zeros(16, 0), options)) is TorchGEMM


def test_experts_take_scales_of_any_strides_with_many_rows() -> None:
    """As a shared expert beside them wants them; the kernels for few rows read a row's scales side by side."""
    for rows, is_refused in ((MAX_LISTED, True), (MAX_LISTED + 1, False)):
        x = quantize_rows(torch.ones(rows, 2 * SIZE), by_group=True, rows_together=True)
        given = RouterLogits(torch.zeros(rows, 4), None, Routing(4, 2))
        inputs = Fp8Inputs(True, sys.maxsize)
        with pytest.raises(AssertionError, match="scales") if is_refused else nullcontext():
            check_experts(x, given, 2 * SIZE, torch.bfloat16, inputs, None)


BLOCKS, CHANNELS = Fp8Inputs(True, many=2), Fp8Inputs(False, many=2)
WRONG_FP8: dict[str, tuple[Fp8Inputs, Callable[[Fp8Rows], Fp8Rows]]] = {
    "scales of rows for a weight with blocks": (BLOCKS, lambda rows: replace(rows, scales=torch.ones(ROWS, 1))),
    "scales of groups for a weight with channels": (CHANNELS, lambda rows: rows),
    "scales of 16 bits": (BLOCKS, lambda rows: replace(rows, scales=rows.scales.half())),
    "strided values": (BLOCKS, lambda rows: replace(rows, values=torch.zeros(ROWS, 4 * SIZE, dtype=FP8)[:, ::2])),
    "another size": (BLOCKS, lambda rows: replace(rows, values=rows.values[:, :SIZE].contiguous())),
    "rows of 16 bits": (BLOCKS, lambda rows: replace(rows, values=rows.values.half())),
    "scales by group for few rows": (
        replace(BLOCKS, many=ROWS),
        lambda rows: replace(rows, scales=rows.scales.t().contiguous().t()),
    ),
}


@pytest.mark.parametrize("fault", WRONG_FP8)
def test_rows_of_another_fp8_format_are_refused(fault: str) -> None:
    inputs, changed = WRONG_FP8[fault]
    rows = quantize_rows(torch.ones(ROWS, 2 * SIZE), by_group=True)
    BLOCKS.check(rows, 2 * SIZE)
    BLOCKS.check(replace(rows, scales=rows.scales.t().contiguous().t()), 2 * SIZE)
    with pytest.raises(AssertionError):
        inputs.check(changed(rows), 2 * SIZE)


@pytest.mark.parametrize("kind", SCHEMES)
def test_fp8_products_refuse_rows_of_another_format(kind: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed here")
    layer, rows = linear(kind), quantize_rows(torch.ones(ROWS, 2 * SIZE), by_group=True)
    for multiply in (lambda x: layer.multiply(x, None), layer.multiply_apart, layer.multiply_gated):
        with pytest.raises(AssertionError):
            multiply(rows)


def test_one_shot_all_reduces_refuse_what_their_kernel_refuses() -> None:
    limits, dtype = Limits(one_shot=4096, two_shot=0), torch.bfloat16
    regions = [torch.zeros(region_bytes(limits, 2), dtype=torch.uint8) for _ in range(2)]
    ranks = CustomAllReduce(0, limits, regions, "")
    x, weight = torch.zeros(ROWS, SIZE, dtype=dtype), torch.ones(SIZE, dtype=dtype)
    odd = torch.zeros(ROWS * SIZE + 2, dtype=dtype)[1:-1].view(ROWS, SIZE)
    for residual in (torch.zeros(ROWS, 2 * SIZE, dtype=dtype)[:, ::2], x[:, :64], x.float(), odd):
        with pytest.raises(AssertionError):
            ranks.add_norm(x, residual, weight, 1e-5)
    for other in (torch.ones(2 * SIZE, dtype=dtype)[::2], weight[:64], weight.half()):
        with pytest.raises(AssertionError):
            ranks.add_norm(x, x.clone(), other, 1e-5)
    with pytest.raises(AssertionError):
        ranks.add_norm(odd, x.clone(), weight, 1e-5)


def one_shot(**changes: Any) -> dict[str, Any]:
    """The arguments of rank 0 of two."""
    x = torch.zeros(ROWS, SIZE, dtype=torch.bfloat16)
    given = {
        "x": x,
        "inbox": torch.zeros(2, 4, 2, SIZE // 2, dtype=torch.int64),
        "inboxes": torch.zeros(2, dtype=torch.int64),
        "epochs": torch.zeros(4, dtype=torch.int32),
        "rank": 0,
        "out": torch.empty_like(x),
    }
    return given | changes


def rows_of(rows: int, width: int = SIZE, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    return {"x": torch.zeros(rows, width, dtype=dtype), "out": torch.zeros(rows, width, dtype=dtype)}


WRONG_SUMS: dict[str, dict[str, Any]] = {
    "float32": one_shot(**rows_of(ROWS, dtype=torch.float32)),
    "an odd width": one_shot(**rows_of(ROWS, 127), inbox=torch.zeros(2, 4, 2, 63, dtype=torch.int64)),
    "three ranks": one_shot(
        inboxes=torch.zeros(3, dtype=torch.int64), inbox=torch.zeros(2, 4, 3, SIZE // 2, dtype=torch.int64)
    ),
    "no rows": one_shot(**rows_of(0)),
    "more rows than the inbox holds": one_shot(**rows_of(5)),
    "an inbox of another width": one_shot(inbox=torch.zeros(2, 4, 2, SIZE, dtype=torch.int64)),
    "a strided inbox": one_shot(inbox=torch.zeros(2, 4, 2, SIZE, dtype=torch.int64)[..., ::2]),
    "an inbox of int32": one_shot(inbox=torch.zeros(2, 4, 2, SIZE // 2, dtype=torch.int32)),
    "epochs of int64": one_shot(epochs=torch.zeros(4, dtype=torch.int64)),
    "a result of other rows": one_shot(out=torch.zeros(ROWS + 1, SIZE, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("fault", WRONG_SUMS)
def test_one_shot_all_reduces_refuse_other_layouts(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[object, ...]] = []
    monkeypatch.setitem(vars(ONE_SHOT), "function", lambda *given: launched.append(given))
    one_shot_all_reduce(**one_shot())
    assert len(launched) == 1
    with pytest.raises(AssertionError):
        one_shot_all_reduce(**WRONG_SUMS[fault])
