"""Which implementation an operation runs, and how it finds its device."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from attention.ops.operation import OPERATIONS, Implementation, operation


@dataclass(frozen=True)
class Pair:
    name: str
    first: Tensor


@pytest.fixture(autouse=True)
def _forget_what_a_test_defines() -> Iterator[None]:
    before = len(OPERATIONS)
    yield
    del OPERATIONS[before:]


def test_the_device_is_that_of_tensors_in_dataclasses_where_no_argument_is_one() -> None:
    @operation(Implementation("other", "tests.ops.test_operation:negative", lambda here: here.type == "meta"))
    def sizes(pair: Pair, times: int) -> int:
        return pair.first.shape[0] * times

    assert sizes(Pair("cpu", torch.zeros(3)), 2) == 6
    assert sizes(Pair("meta", torch.zeros(3, device="meta")), 2) == -6


def test_an_implementation_that_does_not_serve_the_arguments_is_passed_over() -> None:
    table = (
        Implementation("few", "tests.ops.test_operation:negative", lambda here: True, lambda pair, times: times < 3),
    )

    @operation(*table)
    def sizes(pair: Pair, times: int) -> int:
        return pair.first.shape[0] * times

    assert sizes(Pair("", torch.zeros(3)), 2) == -6
    assert sizes(Pair("", torch.zeros(3)), times=4) == 12


def test_every_call_keeps_the_contract_whichever_implementation_runs() -> None:
    def check(pair: Pair, times: int) -> None:
        assert pair.first.is_contiguous(), pair.name

    @operation(
        Implementation("other", "tests.ops.test_operation:negative", lambda here: here.type == "meta"), contract=check
    )
    def sizes(pair: Pair, times: int) -> int:
        return pair.first.shape[0] * times

    for device in ("cpu", "meta"):
        whole = torch.zeros(2, 3, device=device)
        assert abs(sizes(Pair(device, whole), 2)) == 4
        with pytest.raises(AssertionError, match=device):
            sizes(Pair(device, whole.t()), times=2)


def negative(pair: Pair, times: int) -> int:
    return -pair.first.shape[0] * times
