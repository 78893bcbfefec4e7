"""A CPU refuses inputs that a GPU's kernel would refuse or misread, though the torch references take them."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.test_implementations import CASES
from workers.distributed.tp_group import SOLO
from workers.ops.activation import gelu_mul, sigmoid_mul, silu_mul
from workers.ops.norm import add_rms_norm, rms_norm
from workers.ops.packed.product import PackedProduct
from workers.ops.packed.weight import pack
from workers.ops.sampling.logprobs import norms_and_top
from workers.ops.sampling.masks import apply_masks
from workers.ops.vocabulary.largest import largest
from workers.ops.vocabulary.topk_log_softmax import topk_log_softmax


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


# By operation: arguments, by position, and fields of arguments. Kernels take the last stride of these tensors to be 1.
STRIDED = {
    "accept_commit": "2",
    "apply_masks": "0 1 2 3",
    "apply_penalties": "0 1",
    "attach_chains": "2",
    "begin": "1",
    "children": "3.ids",
    "choose": "0 1.slots 3.gaps 3.peaks",
    "commit": "0 3.stop_ids",
    "commit_rows": "2",
    "count_levels": "0 1",
    "delta_rule_chunks": "3.starts 4",
    "delta_rule_rounds": "0.a 0.b 0.qkv 0.z 1.a_log 1.conv 1.dt_bias 2.committed 2.conv 2.pending 2.state 3.mask "
    "3.prefix_len 3.slots 4",
    "expand_latents": "3",
    "find_limits": "0 1",
    "find_matches": "0",
    "follow_chain": "1",
    "follow_level": "3.tokens",
    "fp8_rms_norm": "0 1 2 4.plain 4.values",
    "gated_mlp": "0",
    "grow": "2.log_probabilities",
    "head_input": "1",
    "head_products": "0 2",
    "latent_values": "0",
    "map_decode_rows": "0.page_table 0.prefix_len",
    "map_prefill_rows": "0.starts",
    "mask": "2",
    "move_path": "3",
    "norm_route": "0 1 2.weight 3.correction 3.weight",
    "normed_latents": "0 1 2 4.cos 4.index 4.sin 5.rows 6",
    "packed_expert_products": "0",
    "perturb": "0 1.slots 2",
    "quantize_rows": "0",
    "read_trees": "0.parents",
    "record_tokens": "3",
    "rope": "0 1 2 3 4.q",
    "rope_store": "0 1 2 3 4 5 6.k 6.v 7",
    "router_gemm": "0 1 2",
    "write_best": "0.tokens",
    "write_roots": "0.tokens",
}
STRIDED_TENSORS = [
    (operation, int(position), field)
    for operation, names in STRIDED.items()
    for position, _, field in (name.partition(".") for name in names.split())
]


def with_strides(argument: Any, field: str) -> Any:
    """The argument with the same numbers, the last stride of the tensor, or of that field, being 2."""
    if field:
        return replace(argument, **{field: with_strides(getattr(argument, field), "")})
    return torch.stack((argument, argument), -1)[..., 0]


def last_size(argument: Any, field: str) -> int:
    """The last size of the tensor; 0 where a case has none."""
    tensor = vars(argument).get(field) if field and argument is not None else argument
    return int(tensor.shape[-1]) if isinstance(tensor, Tensor) else 0


@pytest.mark.parametrize("operation,position,field", STRIDED_TENSORS)
def test_a_cpu_refuses_strides_that_a_kernel_does_not_read(operation: str, position: int, field: str) -> None:
    given = (case.arguments(torch.device("cpu")) for case in CASES if case.operation.__name__ == operation)
    arguments = list(next(each for each in given if last_size(each[position], field) > 1))
    arguments[position] = with_strides(arguments[position], field)
    with pytest.raises(AssertionError):
        next(case for case in CASES if case.operation.__name__ == operation).operation(*arguments)


TAKE_SLOTS = sorted(
    {(case.operation.__name__, list(inspect.signature(case.operation.reference).parameters).index("slots"), "")
     for case in CASES if "slots" in inspect.signature(case.operation.reference).parameters}
    | {("choose", 1, "slots"), ("delta_rule_chunks", 3, "slots"), ("delta_rule_rounds", 3, "slots"),
       ("perturb", 1, "slots")}
)  # fmt: skip
WRONG_SLOTS: dict[str, Callable[[Tensor], Tensor]] = {
    "int32": lambda slots: slots.int(),
    "two dimensions": lambda slots: slots[None],
    "strided": lambda slots: with_strides(torch.cat((slots, slots)), ""),
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
