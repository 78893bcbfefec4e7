"""Finds modules of a transformers model that Aerie's fused operations can replace, by comparing results on random
inputs, never by class names alone. `aerie.workers.models.adapter.replace` has the replacements."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any

import torch
from torch import Tensor, nn

from aerie.kernels.experts.gated import GATED, GatedActivation
from aerie.kernels.norm.norm import ACTIVATIONS, rms_norm
from aerie.workers.layers.norm import FullPrecisionRMSNorm, RMSNorm, ZeroCentredRMSNorm

_ROWS, _WIDE, _NARROW = 7, 24, 16  # rows of random inputs, and widths of a small copy of an MLP
_RTOL, _ATOL = 1e-4, 1e-6  # float32 rounding of sums of `_WIDE` products
_NORMS: tuple[tuple[type[RMSNorm], float, bool], ...] = (  # class, offset of its weight, whether the weight is float32
    (RMSNorm, 0.0, False),
    (FullPrecisionRMSNorm, 0.0, True),
    (ZeroCentredRMSNorm, 1.0, True),
)
_STACKED = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
_APPLY_GATE = "_apply_gate"  # method of experts whose computation transformers' `experts_implementation` selects


@dataclass(frozen=True)
class NormMatch:
    """A norm of transformers that a class of Aerie computes.

    kind: the class of Aerie that computes the same norm.
    """

    kind: type[RMSNorm]
    size: int
    eps: float


@dataclass(frozen=True)
class MLPMatch:
    """A gated MLP: down(activation(gate(x)) * up(x)).

    gates: names of the gate and up projections, or of the one projection that has both, gate first.
    down: name of the down projection.
    activation: one of `aerie.kernels.norm.norm.ACTIVATIONS`.
    """

    gates: tuple[str, ...]
    down: str
    activation: str


class RandomNumbers:
    """Random float32 tensors on the CPU, regardless of torch's defaults while a model is built."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator("cpu").manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu")

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator, dtype=torch.float32, device="cpu")


def match_norm(module: nn.Module, dtype: torch.dtype) -> NormMatch | None:
    """Return Aerie's norm that has the module's results in float32, and the nearest ones in `dtype`; None without a
    match. A matching module's only parameter is `weight`."""
    weight = module._parameters.get("weight")
    alone = len(module._parameters) == 1 and not module._buffers and not module._modules
    if not alone or weight is None or weight.dim() != 1:
        return None
    size, random = weight.shape[0], RandomNumbers(0)
    with torch.device("cpu"), torch.no_grad():
        scales = torch.logspace(-4, 2, _ROWS, dtype=torch.float32).unsqueeze(1)  # small scales reveal epsilon
        x = (random.normal(_ROWS, size) + 0.3) * scales
        gain = 0.5 + random.uniform(size)
        expected = tensor_of(_with_weight(module, gain), x)
        if expected is None:
            return None
        equal = [
            (kind, added, full, eps)
            for kind, added, full in _NORMS
            for eps in _numbers_of(module)
            if is_close(rms_norm.reference(x, gain + added, eps), expected)
        ]
        x, gain = x.to(dtype), gain.to(dtype)
        rounded = tensor_of(_with_weight(module, gain), x)
        if not equal or rounded is None or rounded.dtype != dtype:
            return None

        def error(full: bool, added: float, eps: float) -> float:
            ours = rms_norm.reference(x, gain.float() + added if full else gain + added, eps)
            return float((ours.float() - rounded.float()).norm())

        kind, _, _, eps = min(equal, key=lambda candidate: error(candidate[2], candidate[1], candidate[3]))
    return NormMatch(kind, size, eps)


def match_gated_mlp(module: nn.Module) -> MLPMatch | None:
    """Return the module as a gated MLP; None if it does not match. Tested with narrow projections in place of its
    own."""
    linears = {name: child for name, child in module._modules.items() if type(child) is nn.Linear}
    others = [child for name, child in module.named_children() if name not in linears]
    has_tensors = any(True for child in others for _ in (*child.parameters(), *child.buffers()))
    if len(linears) not in (2, 3) or has_tensors or module._parameters or module._buffers:
        return None
    for *gates, down in permutations(linears):
        inner, hidden = linears[down].in_features, linears[down].out_features
        widths = inner if len(gates) == 2 else 2 * inner
        if any((linears[name].in_features, linears[name].out_features) != (hidden, widths) for name in gates):
            continue
        for activation in ACTIVATIONS:
            if _is_gated(module, linears, tuple(gates), down, activation):
                return MLPMatch(tuple(gates), down, activation)
    return None


def _is_gated(
    module: nn.Module, linears: dict[str, nn.Linear], gates: tuple[str, ...], down: str, activation: str
) -> bool:
    """Whether the module computes a gated MLP: compare it with one, on random weights of a few rows and columns."""
    random = RandomNumbers(0)
    wide = _WIDE if len(gates) == 2 else 2 * _WIDE
    with torch.device("cpu"), torch.no_grad():
        small = {name: _random_linear(linears[name], _NARROW, wide, random) for name in gates}
        small[down] = _random_linear(linears[down], _WIDE, _NARROW, random)
        narrow = copied(module)
        narrow._modules |= small
        x = random.normal(_ROWS, _NARROW)
        inner = torch.cat([small[name](x) for name in gates], dim=-1)
        expected = small[down](ACTIVATIONS[activation].reference(inner))
        result = tensor_of(narrow, x.unsqueeze(0))  # models call it with [1, rows, hidden]
    return result is not None and is_close(expected, result.squeeze(0))


def match_experts(module: nn.Module) -> GatedActivation | None:
    """Return the activation of stacked experts without biases, whose gate rows are above their up rows; None for other
    modules. `aerie.workers.models.adapter.routers.RouterChosenExperts` can replace them."""
    if not gathers_experts(module) or any(getattr(module, name, None) is not value for name, value in _STACKED.items()):
        return None
    with torch.device("cpu"), torch.no_grad():
        scales = torch.logspace(-2, 3, _ROWS, dtype=torch.float32).unsqueeze(1)  # large scales reveal limits
        x = RandomNumbers(0).normal(_ROWS, 2 * _WIDE) * scales
        result = tensor_of(getattr(module, _APPLY_GATE), x)
        if result is None or result.device != x.device:
            return None
        gate, up = x.chunk(2, dim=-1)
        return next((activation for activation in _activations(module) if is_close(activation(gate, up), result)), None)


def _activations(module: nn.Module) -> Iterator[GatedActivation]:
    """Yield the possible activations of experts, with factors and limits from their attributes."""
    yield from GATED.values()
    numbers = {float(value) for value in vars(module).values() if type(value) in (int, float) and value > 0}
    for alpha, limit, shift in product([1.0, *sorted(numbers)], [None, *sorted(numbers)], (0.0, 1.0)):
        yield GatedActivation(alpha, limit, shift)


def gathers_experts(module: nn.Module) -> bool:
    """Return whether the module is experts for which transformers gathers the weights of each row's experts
    (`aerie.workers.models.adapter.survey.make_model`)."""
    return hasattr(type(module), _APPLY_GATE)


def _random_linear(like: nn.Linear, inputs: int, outputs: int, random: RandomNumbers) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, like.bias is not None, dtype=torch.float32)
    for parameter in linear.parameters():
        parameter.copy_(random.normal(*parameter.shape))
    return linear


def _with_weight(module: nn.Module, weight: Tensor) -> Any:
    other = copied(module)
    other._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
    return other


def copied(module: nn.Module) -> Any:
    """Return a copy whose parameters and submodules can be replaced without a change of `module`."""
    other = copy.copy(module)
    other._parameters, other._modules = dict(module._parameters), dict(module._modules)
    return other


class Mark:
    """An argument or result that a module of transformers only passes on."""


def result_of(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Return the result of a module or function of transformers; None if the call fails."""
    try:
        return function(*arguments, **named)
    except Exception:  # a model's own code may raise any exception
        return None


def tensor_of(function: Callable[..., Any], *arguments: Any, **named: Any) -> Tensor | None:
    """Return `result_of`; None if it is no tensor."""
    result = result_of(function, *arguments, **named)
    return result if isinstance(result, Tensor) else None


def is_close(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and ours.dtype == theirs.dtype and torch.allclose(ours, theirs, _RTOL, _ATOL)


def _numbers_of(module: nn.Module) -> Iterator[float]:
    """Yield the module's attributes that may be its epsilon."""
    yield from {value for value in vars(module).values() if isinstance(value, float) and 0.0 <= value < 1.0}
