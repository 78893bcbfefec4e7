"""Finds attention modules whose RoPE equals that of Aerie's `rope_store` kernel, by comparing results as in
`aerie.workers.models.adapter.matching`. The kernel then applies RoPE, which saves ten launches per layer."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from aerie.kernels.rope.rope_store import rotate
from aerie.workers.models.adapter.matching import RandomNumbers, result_of

_WORD = "rotary"  # in the names of transformers' RoPE functions
_RTOL, _ATOL = 1e-4, 1e-5  # float32 rounding


@dataclass(frozen=True)
class _Rotation:
    """One call of a RoPE function: function(q, k, cos, sin, *rest, **named) -> found."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    result: Any


@dataclass(frozen=True)
class _Angles:
    """One call of a module that returns cos and sin."""

    module: nn.Module
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    result: tuple[Tensor, Tensor]


class RotationRecorder:
    """Records each attention module's RoPE function in the next pass of a model on the meta device."""

    def __init__(self, model: nn.Module) -> None:
        self._rotations: dict[str, list[_Rotation]] = {}
        self._angles: list[_Angles] = []
        for path, module in model.named_modules():
            names = _names_of(module)
            if names:
                recorders = {name: self._recorder(path, name, _forward_of(module).__globals__[name]) for name in names}
                rebind(module, recorders)
            if module._buffers:
                module.register_forward_hook(self._keep_angles, with_kwargs=True)

    def function_of(self, path: str, q: Tensor, k: Tensor) -> str | None:
        """Return the name of the RoPE function of `q` and `k`, the arguments of attention, if Aerie's kernel can
        replace it; else None. path: path of the attention module."""
        calls = self._rotations.get(path, [])
        if len(calls) != 1 or not _is_pair(calls[0].result):
            return None
        (call,) = calls
        # attention must get the function's results themselves, unmodified
        if call.result[0] is not q or call.result[1] is not k or len(call.arguments) < 4:
            return None
        cos, sin = call.arguments[2:4]
        made = next((angles for angles in self._angles if angles.result[0] is cos and angles.result[1] is sin), None)
        rotates = made is not None and _has_equal_halves(made) and _rotates_alike(call)
        return call.name if rotates else None

    def _recorder(self, path: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, which also records its calls. path: module. name: of the function."""

        def record(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            self._rotations.setdefault(path, []).append(_Rotation(name, function, arguments, named, result))
            return result

        return record

    def _keep_angles(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        if _is_pair(result):
            self._angles.append(_Angles(module, arguments, named, result))


def rebind(module: nn.Module, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Make the module's `forward` call `functions` in place of the global functions of these names. Other modules of
    its class are unchanged."""
    forward = _forward_of(module)
    changed = FunctionType(
        forward.__code__,
        forward.__globals__ | dict(functions),
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    changed.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(changed, module)


def _forward_of(module: nn.Module) -> Any:
    return type(module).forward


def _names_of(module: nn.Module) -> list[str]:
    """Return the names of global RoPE functions in the module's `forward`."""
    forward = _forward_of(module)
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return []
    return [name for name in forward.__code__.co_names if _WORD in name and callable(forward.__globals__.get(name))]


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, Tensor) for part in value)


def _has_equal_halves(angles: _Angles) -> bool:
    """Return whether the second half of cos and sin repeats the first, tested with random frequencies."""
    random = RandomNumbers(0)
    with torch.device("cpu"), torch.no_grad():
        module = copy.copy(angles.module)
        module._buffers = {
            name: None if buffer is None else random.uniform(*buffer.shape).to(buffer.dtype)
            for name, buffer in angles.module._buffers.items()
        }
        result = result_of(module.forward, *_on_cpu(angles.arguments, random), **_on_cpu(angles.named, random))
    if not _is_pair(result):
        return False
    halves = [part.chunk(2, dim=-1) for part in result]
    return all(len(part) == 2 and torch.equal(*part) for part in halves)


def _rotates_alike(call: _Rotation) -> bool:
    """Return whether the function rotates random heads like `aerie.kernels.rope.rope_store.rotate`."""
    q, k, cos, sin = call.arguments[:4]
    if not all(isinstance(part, Tensor) for part in (q, k, cos, sin)) or (q.dim(), cos.dim(), sin.dim()) != (4, 3, 3):
        return False
    random = RandomNumbers(1)
    with torch.device("cpu"), torch.no_grad():
        q, k = (random.normal(*part.shape) for part in (q, k))
        half = (*cos.shape[:-1], cos.shape[-1] // 2)
        cos, sin = (random.normal(*half) for _ in range(2))
        both = (torch.cat((part, part), dim=-1) for part in (cos, sin))
        result = result_of(call.function, q, k, *both, *call.arguments[4:], **call.named)
        expected = [rotate(part[0].transpose(0, 1), cos[0], sin[0]).transpose(0, 1)[None] for part in (q, k)]
    return _is_pair(result) and all(
        ours.shape == theirs.shape and torch.allclose(ours, theirs, _RTOL, _ATOL)
        for ours, theirs in zip(expected, result, strict=True)
    )


def _on_cpu(value: Any, random: RandomNumbers) -> Any:
    """Return arguments with random numbers, or positions, in place of tensors on the meta device."""
    if isinstance(value, dict):
        return {name: _on_cpu(part, random) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_on_cpu(part, random) for part in value)
    if not isinstance(value, Tensor):
        return value
    if value.is_floating_point():
        return random.normal(*value.shape)
    return torch.arange(value.numel()).view(value.shape)
