"""A device without a GPU that refuses what would make a host wait for one.

The meta device stands for the GPU. Whatever reads a value back (`item`, `nonzero`, `bincount`, a mask as an index) has
no result there, and a copy from the host is an operation with a tensor on either side: allowed through `to_device`
alone, which goes through pinned memory. What this cannot see is what a kernel computes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")
_READS_SHAPES = {"aten.bincount.default", "aten.nonzero.default", "aten._local_scalar_dense.default"}


class WouldWaitError(AssertionError):
    """An operation for which a host waits until its GPU has come this far."""


class _Strict(TorchDispatchMode):
    """Raises WouldWaitError. crossing: whether a copy through pinned memory is under way."""

    crossing = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        on_device = [t for t in tensors if t.device == DEVICE]
        if on_device and str(func) in _READS_SHAPES:
            raise WouldWaitError(f"{func}: its result is read on the host")
        if on_device and "index" in str(func) and any(t.dtype is torch.bool for t in _indices(args)):
            raise WouldWaitError(f"{func}: a mask as an index becomes positions on the host")
        if on_device and _assigns_number(str(func), args):
            raise WouldWaitError(f"{func}: torch brings an assigned number from the host and waits for the copy")
        out = func(*args, **(kwargs or {}))
        results = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor)]
        devices = {t.device for t in (*tensors, *results) if t.dim() > 0}
        if len(devices) > 1 and not self.crossing:
            raise WouldWaitError(f"{func}: a copy between host and device that is not through pinned memory")
        return out


def _assigns_number(func: str, args: tuple[Any, ...]) -> bool:
    """Whether this is `x[i] = number` for one element, or for those at an index tensor; slices are filled in place."""
    if func == "aten.copy_.default":
        return args[0].dim() == args[1].dim() == 0
    return func.startswith("aten.index_put") and args[2].dim() == 0


def _indices(args: tuple[Any, ...]) -> list[Tensor]:
    """Return the index tensors of an operation that indexes its first argument."""
    return [t for t in torch.utils._pytree.tree_leaves(args[1:2]) if isinstance(t, Tensor)]


@contextmanager
def strict_device(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> Iterator[list[int]]:
    """Refuses what waits, within; gives the bytes of each copy that `to_device` made. modules: those that call it."""
    mode, copied = _Strict(), list[int]()
    make: Callable[..., Tensor] = torch.tensor

    def to_device(host: Tensor, device: torch.device) -> Tensor:
        assert host.device.type == "cpu" and device == DEVICE
        copied.append(host.nbytes)
        mode.crossing = True
        try:
            return host.to(device)
        finally:
            mode.crossing = False

    def tensor(*args: Any, **kwargs: Any) -> Tensor:
        # made on the host and copied from there, below what a dispatch mode sees
        if torch.device(kwargs.get("device") or "cpu").type != "cpu":
            raise WouldWaitError("torch.tensor(..., device=...): a copy from pageable memory")
        return make(*args, **kwargs)

    with monkeypatch.context() as patch, mode:
        for module in modules:
            patch.setattr(module, "to_device", to_device)
        patch.setattr(torch, "tensor", tensor)
        yield copied
