"""The matrices of an adapter's modules, and of this rank's layers."""

from dataclasses import dataclass

from torch import Tensor

from aerie.workers.layers.weighted import WrongTensorError


@dataclass(frozen=True)
class Matrices:
    """The whole matrices of one module. down: A [rank, in_features]. up: B [out_features, rank], without the scale. An
    embedding's inputs are its ids, and its outputs the hidden size."""

    down: Tensor
    up: Tensor
    scale: float


@dataclass(frozen=True)
class LayerMatrices:
    """One layer's matrices on this rank, as its tables have them at one index, in host memory: of `LoraTables`, or of
    `ExpertLoraTables`, whose tensors begin with a dimension of experts.

    down: [num_parts * max_rank, in_features].
    up: [out_features, max_rank], with the scale.
    """

    down: Tensor
    up: Tensor


def check_matrices(matrices: Matrices, rank: int) -> None:
    """Raise WrongTensorError for matrices of another rank, and for weights that are not finite."""
    for side, tensor, of_rank in (("lora_A", matrices.down, 0), ("lora_B", matrices.up, 1)):
        if tensor.dim() != 2 or tensor.shape[of_rank] != rank:
            raise WrongTensorError(f"({side}) has shape {tuple(tensor.shape)}, adapter_config.json implies rank {rank}")
        if not tensor.is_floating_point():
            raise WrongTensorError(f"({side}) is {tensor.dtype}; it must have a floating type")
        if not bool(tensor.float().isfinite().all()):
            raise WrongTensorError(f"({side}) has weights that are NaN or infinite")


def check_scaled(up: Tensor, scale: float) -> None:
    """Raise WrongTensorError if B times its scale has overflowed the tables' dtype."""
    if not bool(up.isfinite().all()):
        raise WrongTensorError(f"(lora_B) times its scale {scale:g} is beyond {up.dtype}")
