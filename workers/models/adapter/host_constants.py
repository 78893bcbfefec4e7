"""Caches tensors that a transformers model creates from numbers in each pass, as Gemma 3n does with
`torch.tensor(1e-5)`.

Copying these from the host is not allowed during CUDA graph capture. Used by `aerie.workers.models.adapter.model`.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from aerie.attention.backend import NewUnderCaptureError
from aerie.kernels.capability import Capability, is_capturing

_MAX_NUMBERS = 64  # size of a host tensor whose copies are cached
_MAX_CACHED = 4096  # cached tensors; a model may create one for each length of a pass
_FROM_NUMBERS = (torch.tensor, torch.as_tensor)


class HostConstants(TorchFunctionMode):
    """Caches the tensors that a model creates from numbers, by call and numbers, for later passes.

    device: the model's device. During a capture, the first call for a tensor raises NewUnderCaptureError, whose `make`
        creates the tensor.
    Raises RuntimeError if the model changes such a tensor in place (torch hides a TypeError of `+=`).
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._cache: dict[Hashable, Tensor] = {}
        self._ids: set[int] = set()
        self._was_run = False

    @contextmanager
    def over_pass(self) -> Iterator[None]:
        """Cache tensors of the pass within the context. If the first pass has none, later passes have no overhead."""
        if self._was_run and not self._cache:
            yield
            return
        with self:
            yield
        self._was_run = True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        key = _key_of(func, args, kwargs)
        if key is not None:
            return self._constant(key, lambda: func(*args, **kwargs))
        if args and id(args[0]) in self._ids and _is_in_place(func):
            raise RuntimeError(f"{func.__name__} changes a tensor made of numbers in place")
        return func(*args, **kwargs)

    def _constant(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return the cached tensor of a key, made at the first use. Raises NewUnderCaptureError if that is during graph
        capture."""
        if key in self._cache:
            return self._cache[key]
        if is_capturing(self._device):
            message = "a model copies a new tensor from the host under capture; run it once before that"
            raise NewUnderCaptureError(message, lambda: self._constant(key, make))
        constant = make()
        if len(self._cache) < _MAX_CACHED:
            self._cache[key] = constant
            self._ids.add(id(constant))
        return constant


def _key_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
    """Return the cache key of a call that copies numbers from the host; None for other calls."""
    rest = (*args[1:], *sorted(kwargs.items()))
    if func in _FROM_NUMBERS and args and _are_numbers(args[0]):
        return func, repr(args[0]), rest, torch.get_default_dtype()
    if func == Tensor.new_tensor and len(args) == 2 and _are_numbers(args[1]):
        return func, repr(args[1]), args[0].dtype, args[0].device, tuple(sorted(kwargs.items()))
    if func == Tensor.to and _is_host(args[0].device) and args[0].numel() <= _MAX_NUMBERS:
        arguments = tuple(
            (argument.device, argument.dtype) if isinstance(argument, Tensor) else argument for argument in rest
        )
        if _leaves_host((*args[1:], *kwargs.values())):
            return func, repr(args[0].tolist()), args[0].dtype, args[0].shape, arguments
    return None


def _are_numbers(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= _MAX_NUMBERS and all(_are_numbers(item) for item in value)
    return isinstance(value, bool | int | float)


def _leaves_host(arguments: tuple[Any, ...]) -> bool:
    """Return whether arguments of `Tensor.to` name another device than the CPU."""
    devices = (argument.device if isinstance(argument, Tensor) else argument for argument in arguments)
    return any(not _is_host(torch.device(argument)) for argument in devices if isinstance(argument, str | torch.device))


def _is_host(device: torch.device) -> bool:
    return Capability.of(device).shares_host_memory


def _is_in_place(func: Any) -> bool:
    """Return whether the function changes its first argument: add_, __iadd__, __setitem__."""
    name = func.__name__
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__int__", "__index__", "__invert__"))
    return bool(name.endswith("_"))
