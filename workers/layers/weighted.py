"""The interface between a layer and the weight loader (`aerie.workers.models.weights`)."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aerie.kernels.fp8.rows import Fp8Inputs
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.span import Span

_PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class WrongTensorError(ValueError):
    """A checkpoint's tensor does not fit. The text continues a sentence that begins with the tensor's name: "has shape
    ..."."""


@dataclass(frozen=True)
class WeightKey:
    """Identifies a tensor of a module. The family's name map turns module and key into a checkpoint name.

    kind: the name's last component ("weight", "bias", "weight_scale_inv").
    part: the matrix in a stacked module ("q_proj"); "" for a single one.
    expert: the expert's index, in modules with experts.
    """

    kind: str
    part: str = ""
    expert: int | None = None


class WeightedModule(nn.Module, ABC):
    """A module with parameters. Every parameter of a model belongs to one.

    Life cycle: constructed on the meta device, allocated, filled by `load` or `fill_dummy`, finished, run. Unless
    `reload_fault`, it may be filled again by `check_values`, `reopen`, `load` and `reloaded`, while no pass runs.
    """

    finished = False  # set by `aerie.workers.layers.linear.finish_weights`, so that shared modules are finished once

    @property
    def is_sharded(self) -> bool:
        """Whether ranks have different weights. Replicated modules have equal ones."""
        return False

    @abstractmethod
    def weight_keys(self) -> Iterable[WeightKey]:
        """Return all tensors that the checkpoint must have for this module, including those of other ranks."""

    @abstractmethod
    def load(self, key: WeightKey, full: Tensor) -> None:
        """Copy this rank's share of `full`, the checkpoint's whole tensor, on the CPU. Raises WrongTensorError."""

    def fill_missing(self, key: WeightKey) -> bool:
        """Fill in the default if the checkpoint lacks `key`; return False if the key is required."""
        return False

    @abstractmethod
    def fill_dummy(self, generator: torch.Generator) -> None:
        """Fill with random weights that give finite results (`load_format: dummy`).

        generator: on the parameters' device; equal on all ranks unless `is_sharded`.
        """

    def workspace_size(self) -> tuple[int, int]:
        """Return (float32 cells, tickets) of the workspace that this module needs, besides that of its 16-bit or FP8
        GEMMs."""
        return 0, 0

    def finish(self, options: GEMMOptions) -> None:
        """Pack the final weights and choose kernels, before the first pass."""

    @property
    def reload_fault(self) -> str:
        """Why weights cannot be loaded again after `finish`, as a text of WrongTensorError; "" if they can."""
        return ""

    def check_values(self, key: WeightKey, full: Tensor) -> None:
        """Raise WrongTensorError if `full`, of the right shape and dtype, cannot replace weights of a running engine:
        NaN and infinity here."""
        if full.is_floating_point() and full.numel():
            plain = full if full.dtype in _PLAIN_DTYPES else full.float()
            low, high = torch.aminmax(plain)
            limit = max(
                torch.finfo(parameter.dtype).max for parameter in self.parameters() if parameter.is_floating_point()
            )
            if not (float(low) >= -limit and float(high) <= limit):  # false for NaN, too
                raise WrongTensorError(f"has weights that are NaN, infinite or beyond {limit:g}")

    def reopen(self) -> None:
        """After `finish`, store the weights as `load` fills them; they keep their values."""

    def reloaded(self) -> None:
        """Finish again after `reopen`, and after changes of weights that it shares."""


class Unweighted(WeightedModule):
    """A module without tensors of its own, which `finish` prepares."""

    def weight_keys(self) -> tuple[WeightKey, ...]:
        return ()

    def load(self, key: WeightKey, full: Tensor) -> None:
        raise AssertionError("has no weights of its own")

    def fill_dummy(self, generator: torch.Generator) -> None:
        pass


class Vector(WeightedModule):
    """One vector of the checkpoint.

    kind: its name, as the last component.
    span: this rank's share.
    dtype: None: the model's.

    weight: [this rank's share].
    """

    def __init__(self, kind: str, span: Span, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.kind, self.span = kind, span
        self.weight = nn.Parameter(torch.ones(span.size, dtype=dtype), requires_grad=False)

    def weight_keys(self) -> tuple[WeightKey, ...]:
        return (WeightKey(self.kind),)

    def load(self, key: WeightKey, full: Tensor) -> None:
        check_plain(full)
        check_shape(full, (self.span.total,))
        self.weight.data.copy_(full[self.span.first : self.span.end])

    def fill_dummy(self, generator: torch.Generator) -> None:
        self.weight.data.fill_(1.0)


class WeightMethod(nn.Module, ABC):
    """Stores, loads and multiplies the weights of one layer. Constructed while torch's default dtype is the model's.

    kinds: the checkpoint's tensors of each matrix, by the last component of their names.
    """

    kinds: tuple[str, ...] = ("weight",)

    @property
    def format(self) -> str:
        """Format of the weights in the checkpoint, for the log."""
        return "unquantised"

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        """The FP8 format that `multiply` accepts besides the model's dtype; None if it accepts none. Known after
        `finish`."""
        return None

    def num_bytes(self, options: GEMMOptions) -> int:
        """Return the bytes of the weights after `finish(options)`. May be called before weights are loaded."""
        return sum(parameter.nbytes for parameter in self.parameters())

    @abstractmethod
    def fill_dummy(self, generator: torch.Generator) -> None:
        """See `WeightedModule.fill_dummy`."""

    def workspace_size(self) -> tuple[int, int]:
        """See `WeightedModule.workspace_size`."""
        return 0, 0

    @property
    def reload_fault(self) -> str:
        """See `WeightedModule.reload_fault`."""
        return f"is stored as {self.format}, whose weights are converted once, when an engine starts"

    def reopen(self) -> None:
        """See `WeightedModule.reopen`."""

    def reloaded(self) -> None:
        """See `WeightedModule.reloaded`."""

    @abstractmethod
    def finish(self, options: GEMMOptions) -> None:
        """Prepare the final weights for multiplication; call again after a change. Raises ValueError if
        `options.deterministic` is not possible."""


def check_plain(full: Tensor) -> None:
    """Raise WrongTensorError unless a checkpoint's tensor is float32, bfloat16 or float16."""
    if full.dtype not in _PLAIN_DTYPES:
        raise WrongTensorError(f"is {full.dtype}, which config.json's quantization_config does not declare")


def check_shape(tensor: Tensor, shape: Sequence[int]) -> None:
    """Raise WrongTensorError unless a checkpoint's tensor has the shape that the configuration implies."""
    if tuple(tensor.shape) != tuple(shape):
        raise WrongTensorError(f"has shape {tuple(tensor.shape)}, config.json implies {tuple(shape)}")
