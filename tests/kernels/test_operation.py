"""Which implementation an operation runs, and how it finds its device."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from aerie.kernels import contracts
from aerie.kernels.norm.norm import add_rms_norm
from aerie.kernels.operation import OPERATIONS, Implementation, operation
from aerie.speculative.build import local_engine
from tests.support.embedded import embedded_spec


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
    @operation(Implementation("other", "tests.kernels.test_operation:negative", lambda here: here.type == "meta"))
    def sizes(pair: Pair, times: int) -> int:
        return pair.first.shape[0] * times

    assert sizes(Pair("cpu", torch.zeros(3)), 2) == 6
    assert sizes(Pair("meta", torch.zeros(3, device="meta")), 2) == -6


def test_an_implementation_that_does_not_serve_the_arguments_is_passed_over() -> None:
    table = (
        Implementation(
            "few", "tests.kernels.test_operation:negative", lambda here: True, lambda pair, times: times < 3
        ),
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
        Implementation("other", "tests.kernels.test_operation:negative", lambda here: here.type == "meta"),
        contract=check,
    )
    def sizes(pair: Pair, times: int) -> int:
        return pair.first.shape[0] * times

    for device in ("cpu", "meta"):
        whole = torch.zeros(2, 3, device=device)
        assert abs(sizes(Pair(device, whole), 2)) == 4
        with pytest.raises(AssertionError, match=device):
            sizes(Pair(device, whole.t()), times=2)


def test_calls_outside_tests_and_debug_mode_check_no_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    given = torch.zeros(2, 4)[:, ::2], torch.ones(2), 1e-6
    residual = torch.zeros(2, 2).t()
    with pytest.raises(AssertionError):
        add_rms_norm(given[0], residual, *given[1:])
    monkeypatch.setattr(contracts, "checked", False)
    assert add_rms_norm(given[0], residual, *given[1:]).shape == (2, 2)


@pytest.mark.parametrize("debug", [False, True])
def test_a_rank_in_debug_mode_checks_them(debug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contracts, "checked", False)
    with local_engine(embedded_spec(None, 1, debug=debug)):
        assert contracts.checked == debug


def negative(pair: Pair, times: int) -> int:
    return -pair.first.shape[0] * times
