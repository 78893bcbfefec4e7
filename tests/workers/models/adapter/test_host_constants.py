"""Tensors that a model makes of numbers in each pass are made once, and never under a capture. The meta device stands
for a GPU: what leaves the CPU for it is a copy from the host."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from aerie.attention.backend import NewUnderCaptureError
from aerie.workers.models.adapter.host_constants import HostConstants

META = torch.device("meta")


class _Calls(TorchFunctionMode):
    """Records the names of functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def passes(model: Any, constants: HostConstants, num: int) -> tuple[list[Any], _Calls]:
    found, calls = [], _Calls()
    with calls:
        for _ in range(num):
            with constants.over_pass():
                found.append(model())
    return found, calls


def test_numbers_are_copied_once() -> None:
    def model() -> tuple[Tensor, ...]:
        x = torch.ones(2)
        return (
            torch.tensor(1e-5).to(META),
            torch.tensor([1, 2], device=META),
            x.new_tensor([[3.0]]),
            torch.as_tensor(2.5),
            (torch.zeros(1) + 7).to(x.to(META)),  # not made of numbers by one call
        )

    found, calls = passes(model, HostConstants(META), 3)
    assert [calls.names.count(name) for name in ("tensor", "new_tensor", "as_tensor")] == [2, 1, 1]
    assert calls.names.count("to") == 3  # the last is of ones(2), also kept
    first, *others = found
    assert all(each is kept for other in others for each, kept in zip(other, first, strict=True))
    assert [each.dtype for each in first] == [torch.float32, torch.int64, torch.float32, torch.float32, torch.float32]
    assert first[2].tolist() == [[3.0]] and first[3].item() == 2.5


def test_tensors_differ_by_number_dtype_and_device() -> None:
    made = [(1, {}), (1.0, {}), (True, {}), (-0.0, {}), (0.0, {}), (1, {"dtype": torch.float64}), (1, {"device": META})]

    def model() -> list[Tensor]:
        return [torch.tensor(number, **options) for number, options in made]  # type: ignore[arg-type]

    (first, second), _ = passes(model, HostConstants(META), 2)
    assert len({id(each) for each in first}) == len(made)
    assert all(each is other for each, other in zip(first, second, strict=True))
    assert [each.dtype for each in first[:3]] == [torch.int64, torch.float32, torch.bool]
    assert str(first[3]) == "tensor(-0.)" and first[5].dtype == torch.float64 and first[6].device == META


def test_moved_tensors_differ_by_their_numbers() -> None:
    given = iter([1.0, 2.0, 1.0])
    found, _ = passes(lambda: (torch.zeros(1) + next(given)).to(META), HostConstants(META), 3)
    assert found[0] is found[2] and found[0] is not found[1]


def test_a_capture_waits_for_a_new_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = True
    monkeypatch.setattr("aerie.workers.models.adapter.host_constants.is_capturing", lambda device: capturing)
    constants = HostConstants(META)
    with pytest.raises(NewUnderCaptureError) as error:
        passes(lambda: torch.tensor(0.5), constants, 1)
    capturing = False
    assert error.value.make is not None
    error.value.make()
    capturing = True
    found, calls = passes(lambda: torch.tensor(0.5), constants, 2)
    assert found[0] is found[1] and not calls.names.count("tensor")


def test_a_model_without_such_tensors_pays_nothing_after_its_first_pass() -> None:
    constants = HostConstants(META)
    passes(lambda: torch.ones(1), constants, 1)
    tensors, _ = passes(lambda: torch.tensor(1.0), constants, 2)
    assert tensors[0] is not tensors[1], "the mode is left out"


def test_a_change_in_place_is_refused() -> None:
    def adds() -> Tensor:
        total = torch.tensor(0.0)
        total += 1.0
        return total

    for model in (adds, lambda: torch.tensor(0.0).add_(1.0), lambda: torch.tensor([0.0]).__setitem__(0, 1.0)):
        with pytest.raises(RuntimeError, match="in place"):
            passes(model, HostConstants(META), 1)
    (found,), _ = passes(lambda: (-torch.tensor(1.0)).add_(2.0), HostConstants(META), 1)  # of another tensor
    assert found == 1.0
