"""What loads weights: the interface between a module and `workers.models.weights`, which knows names but no layers."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workers.ops.gemm.workspace import GEMMOptions


class WrongTensorError(ValueError):
    """A checkpoint's tensor does not fit. Its text goes on after the tensor's name: "has shape ..."."""


@dataclass(frozen=True)
class WeightKey:
    """Which of a module's tensors is meant; a family's name map turns module and key into a name of the checkpoint.

    kind: the name's last component ("weight", "bias", "weight_scale_inv"). part: of a module that holds several of the
    checkpoint's modules side by side ("q_proj"), "" if it is one. expert: of a module that holds many experts.
    """

    kind: str
    part: str = ""
    expert: int | None = None


class WeightedModule(nn.Module, ABC):
    """A module with parameters of its own. Life: made (on the meta device), allocated, filled by `load` or by
    `fill_dummy`, finished, run. Every parameter of a model belongs to one."""

    finished = False  # set by `workers.layers.linear.finish_weights`; what two models share is finished once

    @abstractmethod
    def weight_keys(self) -> Iterable[WeightKey]:
        """All that the checkpoint must have for this module, also what other ranks keep."""

    @abstractmethod
    def load(self, key: WeightKey, full: Tensor) -> None:
        """Take this rank's share of the checkpoint's whole tensor `full`, on the CPU. Raises WrongTensorError."""

    def fill_missing(self, key: WeightKey) -> bool:
        """The checkpoint lacks `key`: fill in its default and return True, or return False if it must be there."""
        return False

    @abstractmethod
    def fill_dummy(self, generator: torch.Generator) -> None:
        """Random weights that give finite results, for `load_format: dummy`. generator: on the parameters' device; the
        same on every rank, so what is replicated is equal."""

    def workspace_size(self) -> tuple[int, int]:
        """Of the `Workspace` that a model's products share on a GPU: what this module's need beside those of its linear
        method. Float32 cells and tickets."""
        return 0, 0

    def finish(self, options: GEMMOptions) -> None:
        """Once the weights are final, before the first pass: pack them, and choose how to multiply by them."""


def check_shape(tensor: Tensor, shape: Sequence[int]) -> None:
    """Raises WrongTensorError with both shapes if a checkpoint's tensor has another one than the config implies."""
    if tuple(tensor.shape) != tuple(shape):
        raise WrongTensorError(f"has shape {tuple(tensor.shape)}, config.json implies {tuple(shape)}")
