"""Every implementation of every operation against the operation's reference, over its declared cases.

On GPUs as it is; without one, Triton's kernels run in its interpreter, in a process of their own
(`tests.kernels.test_triton_interpreter`). A new implementation is a row of its operation's table, and a new
operation a module of cases here: nothing else is to be written.
"""

import itertools
import re
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aerie.kernels.__main__ import import_operations
from aerie.kernels.capability import Capability
from aerie.kernels.kv.stored_values import FP8
from aerie.kernels.operation import OPERATIONS, Implementation
from tests.kernels.ops.case import TOLERANCE, Case, quick_cases
from tests.support import DOCS
from tests.support.kernels.triton_interpreter import INTERPRETED
from tests.support.repository.pages import page_code
from tests.support.slow import cover

import_operations()
CASES: tuple[Case, ...] = tuple(
    case
    for path in sorted(Path(__file__).parent.glob("*_cases.py"))
    for case in import_module(f"tests.kernels.ops.{path.stem}").CASES
)


QUICK = {id(case) for case in quick_cases([case for case in CASES if not case.slow])}


def _parameters() -> list[Any]:
    return [
        pytest.param(case, each, id=f"{case.operation.__name__}-{each.name}-{case.name}", marks=_marks(case, each))
        for case in CASES
        for each in case.operation.implementations
    ]


def _marks(case: Case, implementation: Implementation) -> list[pytest.MarkDecorator]:
    if not INTERPRETED or not implementation.name.startswith("triton"):
        return [pytest.mark.gpu]
    return [] if id(case) in QUICK else [pytest.mark.slow]


@pytest.mark.parametrize("case,implementation", _parameters())
def test_an_implementation_is_its_reference(case: Case, implementation: Implementation) -> None:
    device = torch.device("cpu" if INTERPRETED else "cuda")
    if not INTERPRETED and implementation not in case.operation.serving(_here()):
        pytest.skip(f"{implementation.name} does not run on this device")
    ours, expected = case.arguments(device), case.arguments(device)
    if implementation.serves is not None and not implementation.serves(*ours):
        pytest.skip(f"{implementation.name} leaves this case to others: {implementation.limits}")
    results = implementation.function(*ours), case.operation.reference(*expected)
    if case.seen is not None:
        results = case.seen(ours, results[0]), case.seen(expected, results[1])
    _compare(case, *results)
    for position in case.written:
        _compare(case, ours[position], expected[position])


@pytest.mark.skipif(INTERPRETED, reason="needs no kernel")
def test_contracts_accept_the_cases() -> None:
    """So that nothing that a kernel is tested with is refused on a CPU."""
    for case in CASES:
        if id(case) in QUICK and case.operation.contract is not None:
            case.operation.contract(*case.arguments(torch.device("cpu")))


def test_few_rows_have_every_value_or_every_pair() -> None:
    rows = [*itertools.product((1, 2, 3), "abc", "fg"), ("padding",)]
    pairs, values = ([rows[i] for i in sorted(cover(rows, strength))] for strength in (2, 1))
    assert pairs[0] == rows[0] and pairs[-1] == rows[-1] and 10 <= len(pairs) <= 12
    assert {(size, kind) for size, kind, _ in pairs[:-1]} == set(itertools.product((1, 2, 3), "abc"))
    assert len(values) == 4 and [set(axis) for axis in zip(*values[:-1], strict=True)] == [{1, 2, 3}, {*"abc"}, {*"fg"}]


def test_every_operation_has_cases() -> None:
    without = {each.name for each in OPERATIONS} - {case.operation.name for case in CASES}
    assert not without, f"no cases in tests/kernels/ops: {', '.join(sorted(without))}"


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/add-an-operation.md, and its kernel under the interpreter."""
    page = page_code("add-an-operation.md")
    OPERATIONS.remove(page.soft_cap)
    x = torch.tensor([[0.0, 30.0, -1000.0]])
    torch.testing.assert_close(page.soft_cap(x, 30.0), 30.0 * torch.tanh(x / 30.0))
    if not INTERPRETED:
        return
    kernel = re.findall(r"```py\n(.*?)```", (DOCS / "add-an-operation.md").read_text(), re.DOTALL)
    (tmp_path / "soft_cap_triton.py").write_text(*kernel)
    monkeypatch.syspath_prepend(tmp_path)
    found = import_module("soft_cap_triton").soft_cap
    for case in page.CASES:
        arguments = case.arguments(torch.device("cpu"))
        _compare(case, found(*arguments), page.soft_cap(*arguments))


def test_every_table_names_functions_that_exist() -> None:
    pytest.importorskip("triton")
    for each in OPERATIONS:
        for implementation in each.implementations:
            if implementation.name == "triton":
                assert callable(implementation.function)


def _here() -> Capability:
    return Capability.of(torch.device("cuda", 0))


def _compare(case: Case, ours: Any, expected: Any) -> None:
    if isinstance(expected, tuple | list):
        assert len(ours) == len(expected)
        for mine, theirs in zip(ours, expected, strict=True):
            _compare(case, mine, theirs)
        return
    if hasattr(expected, "__dict__") and not isinstance(expected, Tensor):
        assert vars(ours).keys() == vars(expected).keys()
        for name, theirs in vars(expected).items():
            if isinstance(theirs, Tensor) or is_dataclass(theirs):
                _compare(case, vars(ours)[name], theirs)
        return
    if not isinstance(expected, Tensor):
        assert ours == expected
        return
    assert ours.dtype == expected.dtype and ours.shape == expected.shape
    if expected.dtype == FP8:
        ours, expected = ours.float(), expected.float()
    if case.exact or not expected.is_floating_point():
        torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
        return
    tolerance = TOLERANCE[expected.dtype] if case.tolerance is None else case.tolerance
    ours, expected = ours.double(), expected.double()
    finite = expected.isfinite()
    torch.testing.assert_close(ours[~finite], expected[~finite], rtol=0, atol=0, equal_nan=True)
    if bool(finite.any()):
        scale = expected[finite].abs().max().clamp_min(1e-30)
        torch.testing.assert_close(ours[finite] / scale, expected[finite] / scale, rtol=0, atol=tolerance)
