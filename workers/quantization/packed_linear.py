"""A linear layer whose weight has few bits: held as the checkpoint stores it until `finish`, then packed."""

import torch
from torch import Tensor, nn

from workers.layers.linear_method import DenseLinearMethod, LinearShape, Part
from workers.ops.fp8.rows import Fp8Inputs, Fp8Rows
from workers.ops.gemm.workspace import GEMMOptions
from workers.ops.packed.product import PackedProduct, choose_product
from workers.ops.packed.tiles import packed_workspace_size
from workers.ops.packed.weight import dequantize
from workers.quantization.packed_scheme import PackedScheme, packed_below, with_rows


class PackedLinear(DenseLinearMethod):
    """stored: by part and kind; empty after `finish`."""

    def __init__(self, shape: LinearShape, scheme: PackedScheme) -> None:
        super().__init__(shape)
        self.scheme, self._dtype = scheme, torch.get_default_dtype()
        self.kinds = (*scheme.kinds, *scheme.unused)
        self.stored = nn.ParameterDict(
            {
                f"{i}-{kind}": nn.Parameter(tensor, requires_grad=False)
                for i, part in enumerate(shape.parts)
                for kind, tensor in scheme.storage(part).items()
            }
        )
        columns = shape.parts[0].columns
        widened = scheme.widened(columns)
        self._margins = columns.first - widened.first, widened.end - columns.end
        self._product: PackedProduct | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def format(self) -> str:
        return str(self.scheme)

    def num_bytes(self, options: GEMMOptions) -> int:
        columns = self.scheme.widened(self.shape.parts[0].columns).size
        packed = self.scheme.packed_bytes(self.shape.out_features, columns)
        dense = self.shape.out_features * self.shape.in_features * self._dtype.itemsize
        return packed if options.packed else packed + dense  # a layer that multiplies by a part of it keeps both

    def dense_weight(self) -> Tensor:
        """Dequantised at each call; for layers that multiply by a part of it."""
        before, _ = self._margins
        return dequantize(self._chosen.weight, self._dtype)[:, before : before + self.shape.in_features]

    def load(self, kind: str, part: Part, full: Tensor) -> None:
        if kind in self.scheme.kinds:
            self.scheme.copy(kind, part, full, self._matrix(self.shape.parts.index(part))[kind])

    def fill_missing(self, kind: str, part: Part) -> bool:
        return kind in self.scheme.unused

    def fill_dummy(self, generator: torch.Generator) -> None:
        for i, part in enumerate(self.shape.parts):
            self.scheme.dummy(self._matrix(i), part.columns.total, generator)

    def _matrix(self, index: int) -> dict[str, Tensor]:
        return {kind: self.stored[f"{index}-{kind}"].data for kind in self.scheme.kinds}

    def workspace_size(self) -> tuple[int, int]:
        widened = self.shape.in_features + sum(self._margins)
        return packed_workspace_size([(self.shape.out_features, widened)])

    def finish(self, options: GEMMOptions) -> None:
        if self._product is not None:
            return
        matrices = [self.scheme.read(self._matrix(i)) for i in range(len(self.shape.parts))]
        if self.shape.padding:
            last = matrices[-1].codes.shape[0]
            matrices[-1] = with_rows(matrices[-1], 0, last + self.shape.padding)
        self._product = choose_product(packed_below(matrices, self.scheme), options)
        self.stored = nn.ParameterDict()

    def multiply(self, x: Tensor | Fp8Rows, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        return self._chosen.multiply(self._widened(x), bias, out)

    def multiply_gated(self, x: Tensor | Fp8Rows, wanted: Fp8Inputs | None = None) -> Tensor | Fp8Rows:
        return self._chosen.multiply_gated(self._widened(x))

    @property
    def _chosen(self) -> PackedProduct:
        assert self._product is not None, "call finish first"
        return self._product

    def _widened(self, x: Tensor | Fp8Rows) -> Tensor:
        assert isinstance(x, Tensor), "fp8_inputs is None"
        return nn.functional.pad(x, self._margins) if any(self._margins) else x
