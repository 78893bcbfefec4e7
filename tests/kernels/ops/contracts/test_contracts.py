"""A CPU refuses inputs that a GPU's kernel would refuse or misread, though the torch references take them."""

import inspect
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from aerie.kernels.norm.norm import add_rms_norm, gelu_mul, rms_norm, sigmoid_mul, silu_mul
from aerie.kernels.packed.product import PackedProduct
from aerie.kernels.packed.weight import pack
from aerie.kernels.sampling.choose import norms_and_top
from aerie.kernels.sampling.penalties import apply_masks
from aerie.kernels.vocabulary.topk_log_softmax import largest, topk_log_softmax
from aerie.workers.distributed.tp_group import SOLO
from tests.kernels.ops.test_implementations import CASES


def strided(*shape: int) -> Tensor:
    """Zeros whose last stride is 2."""
    return torch.zeros(*shape[:-1], 2 * shape[-1])[..., ::2]


def masked(logits: Tensor, slots: Tensor) -> None:
    index = torch.full((3,), -1, dtype=torch.int32)
    apply_masks(logits, slots, index, torch.zeros(1, 1, dtype=torch.int32), 0)


ROWS, WEIGHT, SLOTS = torch.zeros(3, 6), torch.ones(6), torch.zeros(3, dtype=torch.int64)
REFUSED: dict[str, Callable[[], object]] = {
    "add_rms_norm, a strided residual": lambda: add_rms_norm(ROWS, strided(3, 6), WEIGHT, 1e-5),
    "add_rms_norm, a residual of another dtype": lambda: add_rms_norm(ROWS.half(), ROWS.clone(), WEIGHT, 1e-5),
    "rms_norm, a weight of the other 16-bit dtype": lambda: rms_norm(ROWS.half(), WEIGHT.bfloat16(), 1e-5),
    "silu_mul, columns of a wider matrix": lambda: silu_mul(torch.zeros(3, 8)[:, :6]),
    "silu_mul, another dimension": lambda: silu_mul(ROWS[None]),
    "gelu_mul, columns of a wider matrix": lambda: gelu_mul(torch.zeros(3, 8)[:, :6]),
    "sigmoid_mul, a strided x": lambda: sigmoid_mul(strided(3, 2, 4), torch.zeros(3, 2, 4)),
    "largest, another dimension": lambda: largest(ROWS[None]),
    "topk_log_softmax, strided logits": lambda: topk_log_softmax(strided(3, 6), 2),
    "norms_and_top, strided logits": lambda: norms_and_top(strided(3, 6), 2),
    "apply_masks, slots of int32": lambda: masked(ROWS.clone(), SLOTS.int()),
}


TAKE_SLOTS = sorted(
    {(case.operation.__name__, list(inspect.signature(case.operation.reference).parameters).index("slots"), "")
     for case in CASES if "slots" in inspect.signature(case.operation.reference).parameters}
    | {("choose", 1, "slots"), ("delta_rule_chunks", 3, "slots"), ("delta_rule_rounds", 3, "slots"),
       ("perturb", 1, "slots")}
)  # fmt: skip
WRONG_SLOTS: dict[str, Callable[[Tensor], Tensor]] = {
    "int32": lambda slots: slots.int(),
    "two dimensions": lambda slots: slots[None],
    "strided": lambda slots: torch.cat((slots, slots)).repeat_interleave(2)[::2],
}


@pytest.mark.parametrize("fault", WRONG_SLOTS)
@pytest.mark.parametrize("operation,position,field", TAKE_SLOTS)
def test_a_cpu_refuses_slots_that_kernels_do_not_read(operation: str, position: int, field: str, fault: str) -> None:
    case = next(case for case in CASES if case.operation.__name__ == operation)
    arguments = list(case.arguments(torch.device("cpu")))
    slots = getattr(arguments[position], field) if field else arguments[position]
    wrong = WRONG_SLOTS[fault](slots)
    arguments[position] = replace(arguments[position], **{field: wrong}) if field else wrong
    with pytest.raises(AssertionError, match="slots"):
        case.operation(*arguments)


def test_a_cpu_refuses_rows_that_few_bit_kernels_do_not_load() -> None:
    """Rows that begin at addresses which are no multiples of 16 bytes."""
    codes, scales = torch.zeros(64, 32, dtype=torch.uint8), torch.ones(64, 1, dtype=torch.bfloat16)
    product = PackedProduct(pack(codes, scales, None, None, 32, "int4"))
    with pytest.raises(AssertionError, match="aligned"):
        product.multiply(torch.zeros(3, 36, dtype=torch.bfloat16)[:, :32], None)
    assert product.multiply(torch.zeros(3, 32, dtype=torch.bfloat16), None).shape == (3, 64)


def test_ranks_sum_contiguous_tensors_alone() -> None:
    with pytest.raises(AssertionError):
        SOLO.all_reduce(strided(2, 3))


@pytest.mark.parametrize("case", REFUSED)
def test_a_cpu_refuses_what_a_kernel_refuses(case: str) -> None:
    with pytest.raises(AssertionError):
        REFUSED[case]()


def test_inputs_within_the_contracts_pass() -> None:
    add_rms_norm(ROWS, ROWS.clone(), WEIGHT, 1e-5)
    rms_norm(strided(3, 6), WEIGHT, 1e-5)
    sigmoid_mul(torch.zeros(3, 2, 4), torch.zeros(3, 2, 1))
    largest(torch.zeros(3, 8)[:, :6])
    masked(ROWS.clone(), SLOTS)
