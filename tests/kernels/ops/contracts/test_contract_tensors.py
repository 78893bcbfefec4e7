"""Contracts refuse each tensor of another dtype, dimension, size or layout, as far as docstrings fix them.

A new condition of a contract adds its tensor to `refused_tensors`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.ops.contracts.refused_tensors import REFUSED
from tests.kernels.ops.test_implementations import CASES


def other_dtype(tensor: Tensor) -> torch.dtype:
    if tensor.is_floating_point():
        return torch.float32 if tensor.dtype == torch.float16 else torch.float16
    return torch.int32 if tensor.dtype == torch.int64 else torch.int64


# By name: wrong tensors, given a right one and a dimension.
FAULTS: dict[str, Callable[[Tensor, str], Iterable[Tensor]]] = {
    "dtypes": lambda x, at: [x.to(other_dtype(x))],
    "floats": lambda x, at: [x.to(torch.int8)] if x.is_floating_point() else [],
    "dimensions": lambda x, at: [x[None], x[0]],
    "more dimensions": lambda x, at: [x[None]],
    "sizes": lambda x, at: [torch.cat((x, x.narrow(int(at), 0, 1)), int(at))],
    "last stride 2": lambda x, at: [torch.stack((x, x), -1)[..., 0]] if x.dim() and x.shape[-1] > 1 else [],
    "rows of a wider matrix": lambda x, at: [torch.cat((x, x), -1)[..., : x.shape[-1]]] if x.dim() > 1 else [],
}


@cache
def arguments_of(operation: str) -> list[tuple[Any, ...]]:
    """The arguments of the operation's cases. Contracts write nothing, so all tests share them."""
    return [case.arguments(torch.device("cpu")) for case in CASES if case.operation.__name__ == operation]


def found(operation: str, place: str) -> tuple[tuple[Any, ...], Any, Tensor]:
    """Return the arguments of a case that has the tensor, if possible with a last size above 1; the argument and the
    tensor."""
    position, _, field = place.partition(".")
    having = []
    for given in arguments_of(operation):
        argument = given[int(position)]
        tensor = vars(argument).get(field) if field and argument is not None else argument
        if isinstance(tensor, Tensor):
            having.append((given, argument, tensor))
    return next((each for each in having if each[2].dim() and each[2].shape[-1] > 1), having[0])


def with_fault(operation: str, place: str, wrong: Tensor) -> tuple[Any, ...]:
    """Return the arguments of `found` with another tensor."""
    given, argument, _ = found(operation, place)
    position, _, field = place.partition(".")
    changed = replace(argument, **{field: wrong}) if field else wrong
    return *given[: int(position)], changed, *given[int(position) + 1 :]


@pytest.mark.parametrize("fault,operation", [(fault, name) for fault, table in REFUSED.items() for name in table])
def test_a_contract_refuses_other_tensors(fault: str, operation: str) -> None:
    contract = next(case.operation.contract for case in CASES if case.operation.__name__ == operation)
    assert contract is not None
    for named in REFUSED[fault][operation].split():
        place, _, dimension = named.partition("/")
        given, _, right = found(operation, place)
        contract(*given)
        wrong = list(FAULTS[fault](right, dimension))
        assert wrong
        for tensor in wrong:
            with pytest.raises(AssertionError):
                contract(*with_fault(operation, place, tensor))
                pytest.fail(f"{named} is accepted", pytrace=False)


def repeated(tensor: Tensor, times: int) -> Tensor:
    """The tensor, `times` times as large in its last dimension."""
    return torch.cat((tensor,) * times, -1)


# By operation and condition: arguments by position that break it, given the right ones.
Changes = dict[int, Any]
LIMITS: dict[tuple[str, str], Callable[[Sequence[Any]], Changes]] = {
    ("accept_commit", "at most 256 nodes"): lambda given: {
        1: type(given[1])(*(repeated(each, 65) for each in given[1].fields)),
        2: repeated(given[2], 65),
    },
    ("apply_penalties", "a path with its tokens"): lambda given: {4: torch.zeros(6, 1, 1, dtype=torch.int64)},
    ("attach_chains", "not at the root"): lambda given: {3: 0},
    ("attach_chains", "within the tree"): lambda given: {3: given[0].tokens.shape[1]},
    ("commit_rows", "a path as long as the committed rows at most"): lambda given: {2: repeated(given[2], 9)},
    ("commit_rows", "integer counts"): lambda given: {3: given[3].float()},
    ("delta_rule_rounds", "as many rows as are pending at most"): lambda given: {
        2: replace(given[2], pending=given[2].pending[:, :0])
    },
    ("delta_rule_rounds", "replayed only if wide"): lambda given: {3: replace(given[3], replayed=True)},
    ("expand_latents", "inputs a multiple of 16"): lambda given: {
        0: given[0][..., :17].contiguous(),
        3: given[3][:, :1].contiguous(),
    },
    ("find_matches", "a match of one token or more"): lambda given: {3: replace(given[3], shortest=0)},
    ("gated_mlp", "gate and up projections of as many outputs"): lambda given: {2: given[1]},
    ("gated_mlp", "a contiguous result of the right size"): lambda given: {4: given[0][:, :64]},
    ("head_products", "angles where columns are rotated"): lambda given: {3: None},
    ("map_decode_rows", "one row or more"): lambda given: {0: replace(given[0], rows=0)},
    ("map_decode_rows", "rows of the suffix"): lambda given: {0: replace(given[0], suffix_len=given[0].rows - 1)},
    ("move_path", "contiguous pools"): lambda given: {0: tuple(torch.stack((x, x), -1)[..., 0] for x in given[0])},
    ("move_path", "pools of the same pages"): lambda given: {0: (*given[0], given[0][0][:-1])},
    ("normed_latents", "parts of a product in float32"): lambda given: {0: given[0].half()[None].contiguous()},
    ("normed_latents", "parts only with a norm of q"): lambda given: {0: given[0].float()[None].contiguous(), 1: None},
    ("norms_and_top", "k within the vocabulary"): lambda given: {1: given[0].shape[1] + 1},
    ("quantize_rows", "floating point"): lambda given: {0: given[0].int()},
    ("quantize_rows", "16 or 32 bits"): lambda given: {0: given[0].double()},
    ("quantize_rows", "an even number of gated columns"): lambda given: {0: given[0][:, 1:], 3: True},
    ("read_trees", "width within the tree"): lambda given: {2: given[0].tokens.shape[1] + 1},
    ("replay_rows", "once in a pass"): lambda given: {2: replace(given[2], replayed=True)},
    ("replay_rows", "a wide round"): lambda given: {2: replace(given[2], mask=given[2].mask[:, :4])},
    ("replay_rows", "the weights of all layers"): lambda given: {1: replace(given[1], layers=given[1].layers[:1])},
    ("rope", "at most a head's dimensions"): lambda given: {
        1: replace(given[1], cos=repeated(given[1].cos, 2), sin=repeated(given[1].sin, 2))
    },
    ("rope_store", "as many rows of q as of k"): lambda given: {1: given[1][1:], 2: given[2][1:]},
    ("topk_log_softmax", "k of one or more"): lambda given: {1: 0},
    ("topk_log_softmax", "k within the vocabulary"): lambda given: {1: given[0].shape[1] + 1},
    ("write_best", "width within the tree"): lambda given: {4: given[0].tokens.shape[1] + 1},
}


@pytest.mark.parametrize("operation,condition", LIMITS)
def test_a_contract_refuses_what_breaks_a_condition(operation: str, condition: str) -> None:
    contract = next(case.operation.contract for case in CASES if case.operation.__name__ == operation)
    assert contract is not None
    given = arguments_of(operation)[0]
    contract(*given)
    changes = LIMITS[operation, condition](given)
    changed = [changes.get(i, given[i] if i < len(given) else None) for i in range(max(len(given), max(changes) + 1))]
    with pytest.raises(AssertionError):
        contract(*changed)
