"""A linear layer with an FP8 weight. If the device multiplies FP8 and the kernels support the layout of scales, the
weight stays in FP8, and inputs are quantised row by row. Otherwise `finish` dequantises it to the model's dtype."""

import logging

import torch
from torch import Tensor, nn

from aerie.kernels.fp8.product import Fp8Product, build_product
from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows
from aerie.kernels.fp8.tiles import Fp8Matrix
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.kv.fp8 import FP8, FP8_MAX
from aerie.workers.layers.linear_method import DenseLinearMethod, LinearShape, Part
from aerie.workers.quantization.fp8_weight import (
    DUMMY_SCALE,
    Fp8Scheme,
    checked,
    dequantised,
    empty,
    fill_dummy,
    kernel_scales,
    rows_of,
    unreadable,
)

logger = logging.getLogger(__name__)


class Fp8Linear(DenseLinearMethod):
    """weight: [out_features, in_features] float8_e4m3fn; None after `finish` if dequantised.
    scales: float32 scales of each part's whole matrix.
    """

    def __init__(self, shape: LinearShape, scheme: Fp8Scheme) -> None:
        super().__init__(shape)
        assert not shape.padding, "a vocabulary head is left unquantised"
        self.kinds = scheme.kinds
        self.scheme, self._dtype = scheme, torch.get_default_dtype()
        self.weight: nn.Parameter | None = empty(shape.out_features, shape.in_features, dtype=FP8)
        self.scales = nn.ParameterList(empty(*scheme.num_scales(part), dtype=torch.float32) for part in shape.parts)
        self._dense: Tensor | None = None
        self._product: Fp8Product | None = None
        self._matrix: Fp8Matrix | None = None  # what `_product` multiplies

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def format(self) -> str:
        return str(self.scheme)

    def num_bytes(self, options: GEMMOptions) -> int:
        assert self.weight is not None, "is finished"
        is_kept = options.fp8 and unreadable(self.shape.parts, self.scheme) is None
        return self.weight.numel() * (1 if is_kept else self._dtype.itemsize) + sum(int(s.nbytes) for s in self.scales)

    def dense_weight(self) -> Tensor:
        """Return the dense weight, dequantised at each call if it stays in FP8; for layers that multiply by a part of
        it."""
        return self._dequantised() if self._dense is None else self._dense

    def weight_and_scales(self) -> tuple[Tensor, Tensor]:
        """Return weight and scales in the kernels' layout; None if `unreadable`."""
        assert self.weight is not None, "is dequantised"
        return self.weight.data, kernel_scales([scale.data for scale in self.scales], self.shape.parts, self.scheme)

    def load(self, kind: str, part: Part, full: Tensor) -> None:
        assert self.weight is not None, "is finished"
        if kind == "weight":
            rows_of(self.weight, part).copy_(part.cut(checked(full)))
        elif kind == self.scheme.kind:
            self.scales[self.shape.parts.index(part)].data.copy_(self.scheme.scales_of(full, part))

    def fill_missing(self, kind: str, part: Part) -> bool:
        return kind in self.scheme.unused

    def fill_dummy(self, generator: torch.Generator) -> None:
        assert self.weight is not None, "is finished"
        fill_dummy(self.weight.data, generator)
        for scale in self.scales:
            scale.data.fill_(DUMMY_SCALE)

    def finish(self, options: GEMMOptions) -> None:
        if self.weight is None:
            super().finish(options)
            return
        reason = unreadable(self.shape.parts, self.scheme)
        if options.fp8 and reason is None:
            self._matrix = Fp8Matrix(*self.weight_and_scales())
            self._product = build_product(self._matrix, options, self._dtype)
            return
        if options.fp8:
            logger.warning("weights of FP8 [%d, %d] are dequantised: %s", *self.weight.shape, reason)
        dense = self._dequantised()
        self.weight, self._dense = None, dense
        super().finish(options)

    @property
    def reload_fault(self) -> str:
        return ""

    def reopen(self) -> None:
        if self.weight is not None or self._dense is None:
            return
        # a dense number over its scale differs from the FP8 number by the rounding of `dtype`, less than FP8's own
        exact = torch.empty(self._dense.shape, dtype=torch.float32, device=self._dense.device)
        for part, scale in zip(self.shape.parts, self.scales, strict=True):
            inverse = torch.where(scale.data == 0, 0.0, 1.0 / scale.data)
            block = self.scheme.block_of(part)
            rows_of(exact, part).copy_(dequantised(rows_of(self._dense, part), inverse, part, block, torch.float32))
        self.weight = nn.Parameter(exact.clamp(-FP8_MAX, FP8_MAX).to(FP8), requires_grad=False)

    def reloaded(self) -> None:
        if self._matrix is not None:
            self._matrix.scales.copy_(self.weight_and_scales()[1])
        elif self.weight is not None and self._dense is not None:
            self._dense.copy_(self._dequantised())
            self.weight = None
            assert self._options is not None
            if self._options.workspace is None:  # on a CPU, where the GEMM may have a copy
                super().finish(self._options)

    def _dequantised(self) -> Tensor:
        assert self.weight is not None
        dense = torch.empty(self.weight.shape, dtype=self._dtype, device=self.weight.device)
        for part, scale in zip(self.shape.parts, self.scales, strict=True):
            block = self.scheme.block_of(part)
            rows_of(dense, part).copy_(dequantised(rows_of(self.weight, part), scale.data, part, block, self._dtype))
        return dense

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        return None if self._product is None else self._product.inputs

    def multiply(self, x: Tensor | Fp8Rows, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        if self._product is None:
            return super().multiply(x, bias, out)
        self.check(x, bias, out)
        return self._product.multiply(x, bias, out)

    def multiply_apart(self, x: Tensor | Fp8Rows) -> Tensor | None:
        if self._product is None:
            return None
        self.check(x)
        return self._product.multiply_apart(x)

    def multiply_gated(self, x: Tensor | Fp8Rows, wanted: Fp8Inputs | None = None) -> Tensor | Fp8Rows:
        if self._product is None:
            return super().multiply_gated(x)
        self.check(x)
        return self._product.multiply_gated(x, wanted)
