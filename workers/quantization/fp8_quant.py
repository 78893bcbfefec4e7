"""Common parts of the FP8 quantisations: their layers, and how these are stored."""

from abc import abstractmethod
from collections.abc import Sequence

import torch

from workers.layers.experts_method import ExpertsMethod, ExpertsShape, UnquantizedExperts
from workers.layers.linear_method import LinearMethod, LinearShape, UnquantizedLinearMethod
from workers.quantization.fp8_experts import Fp8Experts
from workers.quantization.fp8_linear import Fp8Linear
from workers.quantization.fp8_weight import Fp8Scheme, fp8_fallback
from workers.quantization.quant_method import QuantMethod, all_or_none


class Fp8Quant(QuantMethod):
    """Every linear layer is FP8, except those that the checkpoint names."""

    @property
    @abstractmethod
    def scheme(self) -> Fp8Scheme:
        """The layout of scales."""

    @abstractmethod
    def ignores(self, name: str) -> bool:
        """Whether a module of the checkpoint is not quantised."""

    def fallback(self, device: torch.device) -> str | None:
        return fp8_fallback(device)

    def linear_method(self, names: Sequence[str], shape: LinearShape) -> LinearMethod:
        if all_or_none(names, self.ignores):
            return UnquantizedLinearMethod(shape)
        return Fp8Linear(shape, self.scheme)

    def experts_method(self, names: Sequence[str], shape: ExpertsShape) -> ExpertsMethod:
        if all_or_none(names, self.ignores):
            return UnquantizedExperts(shape)
        return Fp8Experts(shape, self.scheme)
