"""Second moments of the inputs of a model's layers, while it reads texts."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from aerie.kernels.experts.route import RouterLogits
from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows
from aerie.kernels.norm.activation import silu_mul
from aerie.workers.layers.experts_method import ExpertsMethod, ExpertsShape, UnquantizedExperts
from aerie.workers.layers.linear_method import LinearMethod, LinearShape, UnquantizedLinearMethod
from aerie.workers.quantization.quant_method import QuantMethod


class Moments:
    """Sums of x x^T over the inputs x of layers, by `Layer.observed`."""

    def __init__(self) -> None:
        self._wanted: Collection[str] = ()
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def begin(self, wanted: Collection[str]) -> None:
        """Discard all moments, then observe these layers."""
        self._wanted, self._sums, self._counts = wanted, {}, {}

    def add(self, layer: str, x: Tensor) -> None:
        """Add inputs x [rows, inputs] of a layer."""
        if layer in self._wanted and x.shape[0]:
            rows = x.float()
            if layer not in self._sums:
                self._sums[layer], self._counts[layer] = rows.new_zeros(rows.shape[1], rows.shape[1]), 0
            self._sums[layer].addmm_(rows.t(), rows)
            self._counts[layer] += rows.shape[0]

    def take(self, layer: str) -> Tensor | None:
        """Return the mean of x x^T, float32 [inputs, inputs]; None if no input was seen."""
        return None if layer not in self._sums else self._sums[layer] / self._counts[layer]


@dataclass(frozen=True)
class Observed(QuantMethod):
    """Keeps every weight in the model's dtype; `moments` records the inputs."""

    moments: Moments = field(default_factory=Moments)

    def linear_method(self, names: Sequence[str], shape: LinearShape) -> LinearMethod:
        return _ObservedLinear(shape, names[0], self.moments)

    def experts_method(self, names: Sequence[str], shape: ExpertsShape) -> ExpertsMethod:
        return _ObservedExperts(shape, names[0], self.moments)


class _ObservedLinear(UnquantizedLinearMethod):
    def __init__(self, shape: LinearShape, name: str, moments: Moments) -> None:
        super().__init__(shape)
        self._name, self._moments = name, moments

    def multiply(self, x: Tensor | Fp8Rows, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor), "fp8_inputs is None"
        self._moments.add(self._name, x)
        return super().multiply(x, bias, out)

    def multiply_gated(self, x: Tensor | Fp8Rows, wanted: Fp8Inputs | None = None) -> Tensor | Fp8Rows:
        assert isinstance(x, Tensor), "fp8_inputs is None"
        self._moments.add(self._name, x)
        return super().multiply_gated(x, wanted)


class _ObservedExperts(UnquantizedExperts):
    """The experts' first matrices share the moments of all rows, so that memory does not grow with the number of
    experts."""

    def __init__(self, shape: ExpertsShape, name: str, moments: Moments) -> None:
        super().__init__(shape)
        self._name, self._moments = name, moments

    def multiply(self, x: Tensor | Fp8Rows, router: RouterLogits, out: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor), "fp8_inputs is None"
        self._moments.add(self._name, x)
        chosen, _ = router.choose()
        for expert in set(chosen.flatten().tolist()):
            rows = x[(chosen == expert).any(1)]
            self._moments.add(f"{self._name}#{expert}", silu_mul(F.linear(rows, self.gate_up[expert])))
        return super().multiply(x, router, out)


def moments_bytes(columns: int) -> int:
    return columns * columns * torch.float32.itemsize
