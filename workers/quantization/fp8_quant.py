"""What the quantisations to FP8 have in common: which layers are in it, and how those are kept."""

from abc import abstractmethod
from collections.abc import Sequence

import torch

from workers.layers.experts import ExpertsMethod, ExpertsShape
from workers.layers.linear_method import LinearMethod, LinearShape, UnquantizedLinearMethod
from workers.quantization.fp8_experts import Fp8Experts
from workers.quantization.fp8_linear import Fp8Linear
from workers.quantization.fp8_weight import Fp8Scheme, fp8_fallback
from workers.quantization.quant_method import QuantMethod, all_or_none


class Fp8Quant(QuantMethod):
    """Every linear layer in FP8 but those that the checkpoint names."""

    @property
    @abstractmethod
    def scheme(self) -> Fp8Scheme:
        """How scales lie."""

    @abstractmethod
    def ignores(self, name: str) -> bool:
        """Whether a module of the checkpoint is left unquantised."""

    def fallback(self, device: torch.device) -> str | None:
        return fp8_fallback(device)

    def linear_method(self, names: Sequence[str], shape: LinearShape) -> LinearMethod:
        if all_or_none(names, self.ignores):
            return UnquantizedLinearMethod(shape)
        return Fp8Linear(shape, self.scheme)

    def experts_method(self, names: Sequence[str], shape: ExpertsShape) -> ExpertsMethod:
        if any(self.ignores(name) for name in names):
            return super().experts_method(names, shape)
        return Fp8Experts(shape, self.scheme)
