"""`LinearMethod`: loads, shards, stores and multiplies one linear layer's weight.

A layer (`aerie.workers.layers.linear`) knows this rank's rows and columns of the checkpoint's matrices. Its method
knows the tensors that store them, for example a weight and scales. `aerie.workers.quantization.table` chooses the
method.
"""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from aerie.kernels import contracts
from aerie.kernels.capability import ALIGNED_BYTES
from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows
from aerie.kernels.gemm.choice import TorchGEMM, choose_gemm
from aerie.kernels.gemm.host_cpp import HostGEMM
from aerie.kernels.gemm.host_weight import HostWeight
from aerie.kernels.gemm.tiles import INPUT_STEP
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.lora.product import RowAdapters
from aerie.kernels.norm.norm import silu_mul
from aerie.kernels.span import Span
from aerie.workers.layers.weighted import WeightMethod, check_plain, check_shape


@dataclass(frozen=True)
class Part:
    """This rank's share of one matrix of the checkpoint.

    name: the checkpoint's name, for example "q_proj"; "" for the layer's only matrix.
    offset: its first row in the layer's weight.
    """

    name: str
    rows: Span
    columns: Span
    offset: int

    def cut(self, full: Tensor) -> Tensor:
        """Return this rank's [rows, columns] of `full`. Raises WrongTensorError if `full` has another shape."""
        check_shape(full, (self.rows.total, self.columns.total))
        return full[self.rows.first : self.rows.end, self.columns.first : self.columns.end]


@dataclass(frozen=True)
class LinearShape:
    """A layer's weight on this rank: the rows of `parts`, all with the same columns, then `padding` rows."""

    parts: tuple[Part, ...]
    padding: int = 0

    @staticmethod
    def stacked(rows: Iterable[tuple[str, Span]], columns: Span, padding: int = 0) -> "LinearShape":
        """Return the shape of several linear layers with the same inputs, stacked to one.

        rows: this rank's rows of each part, by name.
        columns: this rank's inputs.
        padding: rows of zeros at the end.
        """
        parts, offset = [], 0
        for name, span in rows:
            parts.append(Part(name, span, columns, offset))
            offset += span.size
        return LinearShape(tuple(parts), padding)

    @cached_property
    def out_features(self) -> int:
        return self.parts[-1].offset + self.parts[-1].rows.size + self.padding

    @cached_property
    def in_features(self) -> int:
        return self.parts[0].columns.size

    def part(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)


class LinearMethod(WeightMethod):
    """The weight of one linear layer. Raises ValueError if it cannot store `shape` (for instance, parts that share a
    scale block)."""

    def __init__(self, shape: LinearShape) -> None:
        super().__init__()
        self.shape = shape

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Dtype of inputs and results."""

    @property
    def is_adapted(self) -> bool:
        """Whether the layer's products run alone in this pass, since adapters may change them."""
        return False

    @property
    def base(self) -> "LinearMethod":
        """The method that has the weight, if this one adds to its products; else itself."""
        return self

    @abstractmethod
    def load(self, kind: str, part: Part, full: Tensor) -> None:
        """Copy this rank's share of `full`, the checkpoint's whole tensor of `kind` and `part`. Raises WrongTensorError
        for a wrong shape or dtype."""

    def kinds_of(self, part: Part) -> tuple[str, ...]:
        """Return the kinds of tensors that the checkpoint has for one part; all of `kinds` unless parts differ."""
        return self.kinds

    def fill_missing(self, kind: str, part: Part) -> bool:
        """See `aerie.workers.layers.weighted.WeightedModule.fill_missing`."""
        return False

    @abstractmethod
    def multiply(self, x: Tensor | Fp8Rows, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Return x W^T + bias: [rows, out_features].

        x: [rows, in_features] in the model's dtype or in the format `fp8_inputs`.
        out: memory for the result; None allocates it.
        """

    @property
    def host_weight(self) -> HostWeight | None:
        """The weight that a CPU's kernels multiply; None if another kernel multiplies."""
        return None

    def multiply_last(self, x: Tensor | Fp8Rows, bias: Tensor | None, count: int) -> Tensor:
        """Return the last `count` columns of `multiply`: [rows, count]."""
        return self.multiply(x, bias)[:, -count:]

    def multiply_apart(self, x: Tensor | Fp8Rows) -> Tensor | None:
        """Return split-K partial sums of x W^T; None: call `multiply` instead.

        The consumer adds them in order, which saves the GEMM's programs from waiting for each other.

        returns: [parts, rows, out_features] float32.
        """
        return None

    def multiply_gated(self, x: Tensor | Fp8Rows, wanted: Fp8Inputs | None = None) -> Tensor | Fp8Rows:
        """Return silu(first half of x W^T) * second half: [rows, out_features / 2].

        wanted: the FP8 format of the result; None: the model's dtype.
        """
        return silu_mul(self.multiply(x, None))

    def multiply_adapted(
        self, x: Tensor | Fp8Rows, bias: Tensor | None, out: Tensor | None, adapters: RowAdapters, gated: bool
    ) -> Tensor | None:
        """Return `multiply`, or with `gated` `multiply_gated`, of the weight with the adapters of each row; None if no
        kernel adds them in the product's launch."""
        return None

    def multiply_mlp(self, x: Tensor | Fp8Rows, down: "LinearMethod", out: Tensor | None = None) -> Tensor:
        """Return the product of `multiply_gated` with the weight of `down`, as its `multiply` does."""
        return down.multiply(self.multiply_gated(x, down.fp8_inputs), None, out)


class DenseLinearMethod(LinearMethod):
    """A weight in the dtype of its inputs."""

    _gemm: TorchGEMM | None = None
    _options: GEMMOptions | None = None

    @abstractmethod
    def dense_weight(self) -> Tensor:
        """Return the weight, [out_features, in_features]."""

    @property
    def dtype(self) -> torch.dtype:
        return self.dense_weight().dtype

    def described(self) -> Tensor:
        """Return the weight, or a tensor of its shape and dtype without its numbers and memory, if `dense_weight` would
        convert it."""
        if self._gemm is None or not self._gemm.owns_weight:
            return self.dense_weight()
        return torch.zeros((), dtype=self.dtype).expand(self.shape.out_features, self.shape.in_features)

    def finish(self, options: GEMMOptions) -> None:
        self._options = options
        self._gemm = choose_gemm(self.dense_weight(), options)

    def multiply(self, x: Tensor | Fp8Rows, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        assert self._gemm is not None, "call finish first"
        self.check(x, bias, out)
        assert isinstance(x, Tensor), "fp8_inputs is None"
        return self._gemm.multiply(x, bias, out)

    def multiply_gated(self, x: Tensor | Fp8Rows, wanted: Fp8Inputs | None = None) -> Tensor | Fp8Rows:
        assert self._gemm is not None, "call finish first"
        self.check(x)
        assert isinstance(x, Tensor), "fp8_inputs is None"
        return self._gemm.multiply_gated(x)

    def multiply_adapted(
        self, x: Tensor | Fp8Rows, bias: Tensor | None, out: Tensor | None, adapters: RowAdapters, gated: bool
    ) -> Tensor | None:
        if self._gemm is None:  # a format with kernels of its own
            return None
        self.check(x, bias, out)
        assert isinstance(x, Tensor), "fp8_inputs is None"
        return self._gemm.multiply_adapted(x, bias, out, adapters, gated)

    @property
    def host_weight(self) -> HostWeight | None:
        return self._gemm.stored if isinstance(self._gemm, HostGEMM) else None

    def check(self, x: Tensor | Fp8Rows, bias: Tensor | None = None, out: Tensor | None = None) -> None:
        """Assert what GPU kernels require of inputs beyond torch's GEMM, if `contracts.checked`.

        x: [rows, in_features], last stride 1; rows aligned to 16 bytes if in_features is a multiple of INPUT_STEP.
        bias: [out_features], contiguous.
        out: [rows, out_features], contiguous.
        """
        if not contracts.checked:
            return
        inputs, outputs = self.shape.in_features, self.shape.out_features
        if isinstance(x, Tensor):
            rows = x.shape[0]
            assert x.shape == (rows, inputs) and x.stride(1) == 1, "[rows, in_features]"
            assert x.dtype == self.dtype
            if inputs and inputs % INPUT_STEP == 0:
                addresses = x.data_ptr() | x.stride(0) * x.itemsize
                assert addresses % ALIGNED_BYTES == 0, "rows are aligned for loads of 16 bytes"
        else:
            assert self.fp8_inputs is not None, "the layer takes no FP8 rows"
            self.fp8_inputs.check(x, inputs)
            rows = x.values.shape[0]
        assert bias is None or (bias.shape == (outputs,) and bias.is_contiguous())
        assert out is None or (out.shape == (rows, outputs) and out.dtype == self.dtype and out.is_contiguous())


class UnquantizedLinearMethod(DenseLinearMethod):
    """A weight in bfloat16, float16 or float32."""

    def __init__(self, shape: LinearShape) -> None:
        super().__init__(shape)
        self.weight = nn.Parameter(torch.empty(shape.out_features, shape.in_features), requires_grad=False)

        self._last: dict[int, TorchGEMM] = {}  # for `multiply_last`, by the number of columns

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def dense_weight(self) -> Tensor:
        """Return the weight; a copy, converted at each call, if the GEMM has it in its own layout."""
        return self.weight if self._gemm is None or not self._gemm.owns_weight else self._gemm.dense()

    @property
    def reload_fault(self) -> str:
        return ""

    def finish(self, options: GEMMOptions) -> None:
        super().finish(options)
        if self._gemm is not None and self._gemm.owns_weight:
            self.weight.data = self.weight.data.new_empty((0, self.shape.in_features))
        self._last.clear()

    def reopen(self) -> None:
        if self._options is not None and self._options.workspace is None:  # on a CPU, where a GEMM may have a copy
            self.weight.data = self.dense_weight().data
            self._gemm = None
            self._last.clear()

    def reloaded(self) -> None:
        if self._gemm is None and self._options is not None:
            self.finish(self._options)

    def multiply_last(self, x: Tensor | Fp8Rows, bias: Tensor | None, count: int) -> Tensor:
        assert self._options is not None, "call finish first"
        self.check(x, bias)
        assert isinstance(x, Tensor), "fp8_inputs is None"
        if count not in self._last:
            self._last[count] = choose_gemm(self.dense_weight()[-count:], self._options)
        return self._last[count].multiply(x, None if bias is None else bias[-count:], None)

    def load(self, kind: str, part: Part, full: Tensor) -> None:
        check_plain(full)
        self.weight.data[part.offset : part.offset + part.rows.size].copy_(part.cut(full))
        if self.shape.padding:
            self.weight.data[-self.shape.padding :].zero_()

    def fill_dummy(self, generator: torch.Generator) -> None:
        self.weight.data.normal_(0.0, 0.02, generator=generator)
