"""A pass of a model of transformers reads no value on the host, copies none from it, and has no shape that depends on
values: on a GPU it would wait, or end the recording of a CUDA graph.

    pytest -m slow tests/workers/models/adapter/test_host_reads.py    # every kind
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from aerie.workers.models.adapter.model import TransformersModel, _Head
from tests.support.target_answers import served_answers
from tests.workers.models.adapter.test_every_decoder import EQUAL, OUTCOMES, make
from tests.workers.models.test_targets import worker_of

QUICK = ("mixtral",)  # attention as every model's, and experts
_READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.bincount", "aten.masked_select", "aten._unique")


class _RefuseReads(TorchDispatchMode):
    """Raises AssertionError for an operation that reads values on the host, or has a mask as an index."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert not str(func).startswith(_READS), f"{func}: a value is read on the host"
        indices = torch.utils._pytree.tree_leaves(args[1:2]) if "index" in str(func) else []
        assert not any(isinstance(each, torch.Tensor) and each.dtype is torch.bool for each in indices), f"{func}: mask"
        return func(*args, **(kwargs or {}))


class _RefuseTensors(TorchFunctionMode):
    """Raises AssertionError for a tensor made of numbers."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func != torch.tensor, "torch.tensor(...): a copy from the host in each pass"
        return func(*args, **(kwargs or {}))


def refuse_reads(monkeypatch: pytest.MonkeyPatch, owner: type, passes: list[str]) -> None:
    """Make passes of `owner` refuse reads, and all but the first one refuse tensors made of numbers, which a model may
    keep."""
    forward: Any = owner.forward  # type: ignore[attr-defined]

    def checked(self: Any, *given: Any, **named: Any) -> Any:
        first = owner.__name__ not in passes
        passes.append(owner.__name__)
        with _RefuseReads(), nullcontext() if first else _RefuseTensors():
            return forward(self, *given, **named)

    monkeypatch.setattr(owner, "forward", checked)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # transformers' GPT-BigCode
@pytest.mark.parametrize(
    "kind",
    [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in OUTCOMES[EQUAL].split() if each not in QUICK)],
)
def test_a_pass_reads_nothing_on_the_host(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aerie.workers.models.registry.ARCHITECTURES", {})
    make(tmp_path, kind)
    passes: list[str] = []
    for owner in (TransformersModel, _Head):
        refuse_reads(monkeypatch, owner, passes)
    served_answers(worker_of(tmp_path))
    assert set(passes) == {"TransformersModel", "_Head"}


def test_a_read_is_refused() -> None:
    with _RefuseReads(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        torch.ones(1).item()
    with _RefuseReads(), pytest.raises(AssertionError, match="index.Tensor: mask"):
        torch.ones(2)[torch.ones(2) > 0]


def test_a_tensor_from_the_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Copies(torch.nn.Module):
        def forward(self) -> torch.Tensor:
            return torch.tensor(1.0)

    refuse_reads(monkeypatch, Copies, [])
    assert Copies()() == 1.0
    with pytest.raises(AssertionError, match="a copy from the host"):
        Copies()()
