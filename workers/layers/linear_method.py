"""`LinearMethod`: how one linear layer holds its weight, cuts it, loads it and multiplies by it.

A layer (`workers.layers.linear`) knows which rows and columns of which of the checkpoint's matrices this rank has; its
method knows in which tensors they are kept (a weight; a weight and scales), and computes. Which method a layer gets is
decided by the checkpoint's `QuantMethod` (`workers.quantization.table`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workers.layers.weighted import WrongTensorError, check_shape
from workers.ops.activation import silu_mul
from workers.ops.fp8.rows import Fp8Inputs, Fp8Rows
from workers.ops.gemm.choice import TorchGEMM, choose_gemm
from workers.ops.gemm.workspace import GEMMOptions
from workers.span import Span

_PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Part:
    """One of the checkpoint's matrices in a layer's weight, and this rank's share of it. name: "q_proj", or "" if it is
    the layer's only one. offset: of its first row in the layer's weight."""

    name: str
    rows: Span
    columns: Span
    offset: int

    def cut(self, full: Tensor) -> Tensor:
        """This rank's [rows, columns] of the whole matrix `full`. Raises WrongTensorError if it has another shape."""
        check_shape(full, (self.rows.total, self.columns.total))
        return full[self.rows.first : self.rows.end, self.columns.first : self.columns.end]


@dataclass(frozen=True)
class LinearShape:
    """A layer's weight on this rank: `parts` one below the other, all with the same columns, then `padding` rows."""

    parts: tuple[Part, ...]
    padding: int = 0

    @staticmethod
    def stacked(rows: Iterable[tuple[str, Span]], columns: Span, padding: int = 0) -> "LinearShape":
        """rows: of each part by its name."""
        parts, offset = [], 0
        for name, span in rows:
            parts.append(Part(name, span, columns, offset))
            offset += span.size
        return LinearShape(tuple(parts), padding)

    @property
    def out_features(self) -> int:
        return self.parts[-1].offset + self.parts[-1].rows.size + self.padding

    @property
    def in_features(self) -> int:
        return self.parts[0].columns.size

    def part(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)


def check_plain(full: Tensor) -> None:
    """Raises WrongTensorError if a checkpoint's tensor is of no type that unquantised weights have."""
    if full.dtype not in _PLAIN_DTYPES:
        raise WrongTensorError(f"is {full.dtype}, which config.json's quantization_config does not tell")


class LinearMethod(nn.Module, ABC):
    """One layer's weights and what is done with them. Made while torch's default type is the model's; parameters of any
    other type say so. Raises ValueError, when it is made, if it cannot hold `shape` (for instance parts that cut a
    block of scales in two).

    kinds: what the checkpoint has of each part, as the last components of names.
    """

    kinds: tuple[str, ...] = ("weight",)

    def __init__(self, shape: LinearShape) -> None:
        super().__init__()
        self.shape = shape

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of inputs and results."""

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        """None if it takes rows in no form of FP8. Known once it is finished."""
        return None

    @abstractmethod
    def load(self, kind: str, part: Part, full: Tensor) -> None:
        """Take this rank's share of the whole tensor `full` that the checkpoint has as `kind` of a part. Raises
        WrongTensorError if its shape or type is another one."""

    def fill_missing(self, kind: str, part: Part) -> bool:
        """See `workers.layers.weighted.WeightedModule.fill_missing`."""
        return False

    @abstractmethod
    def fill_dummy(self, generator: torch.Generator) -> None:
        """See `workers.layers.weighted.WeightedModule.fill_dummy`."""

    @abstractmethod
    def finish(self, options: GEMMOptions) -> None:
        """Once, when the weights are final and before they are multiplied by; again if they are changed. Raises
        ValueError if the method cannot do what `options.deterministic` asks for."""

    @abstractmethod
    def multiply(self, x: Tensor | Fp8Rows, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """[rows, out_features] x W^T + bias for x [rows, in_features], which is of `fp8_inputs` or of the model's type;
        in the memory `out` if it is given."""

    def multiply_apart(self, x: Tensor | Fp8Rows) -> Tensor | None:
        """Float32 [parts, rows, out_features], whose sum in their order is x W^T, for a reader that adds them up, so
        that programs which share a sum need not wait for each other. None where `multiply` is to be called instead."""
        return None

    def multiply_gated(self, x: Tensor | Fp8Rows, wanted: Fp8Inputs | None = None) -> Tensor | Fp8Rows:
        """[rows, out_features / 2], silu of the first half of x W^T times the second, for x as of `multiply`. wanted:
        by the layer after; None and the model's type if it takes no other."""
        return silu_mul(self.multiply(x, None))


class DenseLinearMethod(LinearMethod):
    """Multiplies by a weight in the type of its inputs, wherever that is kept."""

    _gemm: TorchGEMM | None = None

    @abstractmethod
    def dense_weight(self) -> Tensor:
        """[out_features, in_features]"""

    @property
    def dtype(self) -> torch.dtype:
        return self.dense_weight().dtype

    def finish(self, options: GEMMOptions) -> None:
        self._gemm = choose_gemm(self.dense_weight(), options)

    def multiply(self, x: Tensor | Fp8Rows, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        assert self._gemm is not None, "finish comes first"
        assert isinstance(x, Tensor), "was not asked for"
        return self._gemm.multiply(x, bias, out)

    def multiply_gated(self, x: Tensor | Fp8Rows, wanted: Fp8Inputs | None = None) -> Tensor | Fp8Rows:
        assert self._gemm is not None, "finish comes first"
        assert isinstance(x, Tensor), "was not asked for"
        return self._gemm.multiply_gated(x)


class UnquantizedLinearMethod(DenseLinearMethod):
    """A weight of its own, in bfloat16, float16 or float32."""

    def __init__(self, shape: LinearShape) -> None:
        super().__init__(shape)
        self.weight = nn.Parameter(torch.empty(shape.out_features, shape.in_features), requires_grad=False)

    def dense_weight(self) -> Tensor:
        return self.weight

    def load(self, kind: str, part: Part, full: Tensor) -> None:
        check_plain(full)
        self.weight.data[part.offset : part.offset + part.rows.size].copy_(part.cut(full))
        if self.shape.padding:
            self.weight.data[-self.shape.padding :].zero_()

    def fill_dummy(self, generator: torch.Generator) -> None:
        self.weight.data.normal_(0.0, 0.02, generator=generator)
