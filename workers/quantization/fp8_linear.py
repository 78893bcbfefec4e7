"""Linear layers and stacked experts with FP8 weights. If the device multiplies FP8 and the kernels support the layout
of scales, weights stay in FP8 and inputs are quantised row by row. Otherwise `finish` dequantises weights to the
model's dtype; then a shard of experts may split a scale block."""

import logging

import torch
from torch import Tensor, nn

from aerie.kernels.experts.fused import build_experts, fuses
from aerie.kernels.experts.gated import SWIGLU
from aerie.kernels.experts.weights import ExpertWeights
from aerie.kernels.fp8.product import Fp8Product, build_product
from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows
from aerie.kernels.fp8.tiles import Fp8Matrix
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.kv.stored_values import FP8, FP8_MAX
from aerie.workers.layers.experts_method import (
    DenseExperts,
    ExpertsShape,
    shared_columns,
    shared_rows,
    with_shared,
)
from aerie.workers.layers.linear_method import DenseLinearMethod, LinearMethod, LinearShape, Part
from aerie.workers.quantization.fp8_weight import (
    DUMMY_SCALE,
    Fp8Scheme,
    checked,
    dequantised,
    dummy_scale,
    empty,
    fill_dummy,
    kernel_scales,
    rows_of,
    unreadable,
)

logger = logging.getLogger(__name__)


class Fp8Linear(DenseLinearMethod):
    """A linear layer with an FP8 weight.

    weight: [out_features, in_features] float8_e4m3fn; None after `finish` if dequantised.
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
        stays_fp8 = options.fp8 and unreadable(self.shape.parts, self.scheme) is None
        return self.weight.numel() * (1 if stays_fp8 else self._dtype.itemsize) + sum(
            int(s.nbytes) for s in self.scales
        )

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
        """Return the weight in the model's dtype."""
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


class Fp8Experts(DenseExperts):
    """Stacked experts with FP8 weights.

    weights: gate_up and down of all experts, float8_e4m3fn; None after `finish` if dequantised.
    scales: per matrix, of all experts, float32 [experts, scales of rows, scales of columns], until `finish`.
    """

    def __init__(self, shape: ExpertsShape, scheme: Fp8Scheme) -> None:
        super().__init__(shape)
        if shape.biased or shape.activation != SWIGLU:
            raise ValueError(
                "quantization_config: experts in FP8 with biases or another activation than SiLU are not supported; "
                "use a checkpoint in MXFP4 or bf16"
            )
        self.kinds = scheme.kinds
        self.scheme = scheme
        self.weights = nn.ParameterList(
            nn.Parameter(shape.stacked(matrix, FP8), requires_grad=False) for matrix in (shape.gate_up, shape.down)
        )
        self.scales = nn.ParameterDict(
            {part.name: empty(shape.num_experts, *scheme.num_scales(part), dtype=torch.float32) for part in shape.parts}
        )
        self._shared: tuple[Fp8Linear, Fp8Linear] | None = None

    @property
    def format(self) -> str:
        return str(self.scheme)

    def num_bytes(self, options: GEMMOptions) -> int:
        shapes = (self.shape.gate_up, self.shape.down)
        stays_fp8 = options.fp8 and all(unreadable(matrix.parts, self.scheme) is None for matrix in shapes)
        size = 1 if stays_fp8 else self.dtype.itemsize
        return sum(int(w.numel()) * size for w in self.weights) + sum(
            int(scale.nbytes) for scale in self.scales.values()
        )

    def load(self, kind: str, expert: int, part: Part, full: Tensor) -> None:
        if kind == "weight":
            mine = self.weights[0 if part in self.shape.gate_up.parts else 1]
            rows_of(mine.data[expert], part).copy_(part.cut(checked(full)))
        elif kind == self.scheme.kind:
            self.scales[part.name].data[expert].copy_(self.scheme.scales_of(full, part))

    def fill_missing(self, kind: str) -> bool:
        return kind in self.scheme.unused

    def fill_dummy(self, generator: torch.Generator) -> None:
        for weights in self.weights:
            for expert in weights.data:
                fill_dummy(expert, generator)
        for part in self.shape.parts:
            self.scales[part.name].data.fill_(dummy_scale(part.columns.total))

    def join(self, gate_up: LinearMethod, down: LinearMethod, options: GEMMOptions) -> bool:
        if not isinstance(gate_up, Fp8Linear) or not isinstance(down, Fp8Linear):
            return False
        alike = self.scheme == gate_up.scheme == down.scheme
        if alike and self.shape.num_shared and self._stays_fp8(options):
            self._shared = gate_up, down
        return self._shared is not None

    def _stays_fp8(self, options: GEMMOptions) -> bool:
        shapes = (self.shape.gate_up, self.shape.down)
        return fuses(self.shape.size, self.shape.width, options, in_fp8=True) and all(
            unreadable(matrix.parts, self.scheme) is None for matrix in shapes
        )

    def finish(self, options: GEMMOptions) -> None:
        if self._fused is not None:
            return
        if self._stays_fp8(options):
            self._keep(options)
            return
        if self._dense is None:
            if options.fp8:
                size, width = self.shape.size, self.shape.width
                logger.warning("experts of FP8 [%d, %d] are dequantised: blocks or sizes do not fit", size, width)
            gate_up, down = self.weights
            shape = self.shape
            self._dense = self._all_dequantised(gate_up, shape.gate_up), self._all_dequantised(down, shape.down)
            self.weights = nn.ParameterList()
        super().finish(options)

    def _keep(self, options: GEMMOptions) -> None:
        """Keep the experts in FP8: append the shared experts to the routed ones, and choose the kernels."""
        shape = self.shape
        scales = [
            kernel_scales([self.scales[part.name].data for part in matrix.parts], matrix.parts, self.scheme)
            for matrix in (shape.gate_up, shape.down)
        ]
        num_shared = shape.num_shared if self._shared is not None else 0
        if self._shared is not None:
            for i, (method, by_expert) in enumerate(zip(self._shared, (shared_rows, shared_columns), strict=True)):
                weight, scale = method.weight_and_scales()
                self.weights[i].data = with_shared(self.weights[i].data, by_expert(weight, num_shared))
                scales[i] = with_shared(scales[i], by_expert(scale, num_shared))
        gate_up, down = (weights.data for weights in self.weights)
        weights = ExpertWeights(
            gate_up,
            down,
            gate_up_scales=scales[0],
            down_scales=scales[1],
            num_shared=num_shared,
            held=shape.held_if_some,
        )
        self._fused = build_experts(weights, options, self.dtype)
        self._shared, self.scales = None, nn.ParameterDict()

    def _all_dequantised(self, weights: Tensor, shape: LinearShape) -> Tensor:
        """Dequantise expert by expert, because scales expanded to the size of all weights would take four times their
        memory."""
        dense = torch.empty(weights.shape, dtype=self.dtype, device=weights.device)
        for part in shape.parts:
            block = self.scheme.block_of(part)
            for expert in range(self.shape.num_experts):
                mine, scale = rows_of(weights[expert], part), self.scales[part.name].data[expert]
                rows_of(dense[expert], part).copy_(dequantised(mine, scale, part, block, self.dtype))
        return dense
