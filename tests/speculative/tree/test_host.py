"""The operations on trees and copied drafts that have an implementation for CPUs, against their references."""

from dataclasses import is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from aerie.kernels.capability import Capability
from tests.kernels.ops import suffix_match_cases, tree_read_cases
from tests.kernels.ops.case import Case
from tests.support.kernels.num_operations import num_operations

CPU = torch.device("cpu")
CASES = (*suffix_match_cases.CASES, *tree_read_cases.CASES)


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [each for field in vars(value).values() for each in tensors(field)] if is_dataclass(value) else []


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.operation.__name__}-{case.name}")
def test_numpy_gives_what_torch_does(case: Case) -> None:
    (host,) = case.operation.serving(Capability("cpu"))
    assert host.name == "numpy"
    ours, expected = case.arguments(CPU), case.arguments(CPU)
    if host.serves is not None and not host.serves(*ours):
        pytest.skip(f"numpy serves {host.limits}")
    found, wanted = tensors(host.function(*ours)), tensors(case.operation.reference(*expected))
    assert len(found) == len(wanted)
    changed = [
        (one, other)
        for mine, theirs in zip(ours, expected, strict=True)
        for one, other in zip(tensors(mine), tensors(theirs), strict=True)
    ]
    for one, other in (*zip(found, wanted, strict=True), *changed):
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert all(each.is_contiguous() for each in found)


def test_copied_drafts_run_hardly_an_operation_of_torch_on_a_cpu() -> None:
    """Only views of their arguments. They ran some forty a round: 4 % of a plain round of the embedded pair."""
    for case in CASES:
        arguments = case.arguments(CPU)
        if any(each.dtype == torch.uint16 for each in arguments if isinstance(each, Tensor)):
            continue  # masks for a GPU's backend
        (host,) = case.operation.serving(Capability("cpu"))
        assert num_operations(lambda: host.function(*arguments)) <= 14, case.name  # noqa: B023
