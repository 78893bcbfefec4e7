"""Stacked experts with FP8 weights. If the device multiplies FP8 and the kernels support the layout of scales, weights
stay in FP8, and rows are also quantised. Otherwise `finish` dequantises them to the model's dtype; then a shard may
split a scale block."""

import logging

import torch
from torch import Tensor, nn

from aerie.kernels.experts.fused import build_experts, fuses
from aerie.kernels.experts.gated import SWIGLU
from aerie.kernels.experts.weights import ExpertWeights
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.kv.fp8 import FP8
from aerie.workers.layers.experts_method import DenseExperts, ExpertsShape
from aerie.workers.layers.linear_method import LinearMethod, LinearShape, Part
from aerie.workers.layers.shared_experts import shared_columns, shared_rows, with_shared
from aerie.workers.quantization.fp8_linear import Fp8Linear
from aerie.workers.quantization.fp8_weight import (
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


class Fp8Experts(DenseExperts):
    """weights: gate_up and down of all experts, float8_e4m3fn; None after `finish` if dequantised.
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
            nn.Parameter(shape.stacked(one, FP8), requires_grad=False) for one in (shape.gate_up, shape.down)
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
        is_kept = options.fp8 and all(unreadable(one.parts, self.scheme) is None for one in shapes)
        size = 1 if is_kept else self.dtype.itemsize
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
        if alike and self.shape.num_shared and self._is_kept(options):
            self._shared = gate_up, down
        return self._shared is not None

    def _is_kept(self, options: GEMMOptions) -> bool:
        shapes = (self.shape.gate_up, self.shape.down)
        return fuses(self.shape.size, self.shape.width, options, in_fp8=True) and all(
            unreadable(one.parts, self.scheme) is None for one in shapes
        )

    def finish(self, options: GEMMOptions) -> None:
        if self._fused is not None:
            return
        if self._is_kept(options):
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
        shape = self.shape
        scales = [
            kernel_scales([self.scales[part.name].data for part in one.parts], one.parts, self.scheme)
            for one in (shape.gate_up, shape.down)
        ]
        num_shared = shape.num_shared if self._shared is not None else 0
        if self._shared is not None:
            for i, (method, by_expert) in enumerate(zip(self._shared, (shared_rows, shared_columns), strict=True)):
                weight, scale = method.weight_and_scales()
                self.weights[i].data = with_shared(self.weights[i].data, by_expert(weight, num_shared))
                scales[i] = with_shared(scales[i], by_expert(scale, num_shared))
        gate_up, down = (weights.data for weights in self.weights)
        weights = ExpertWeights(gate_up, down, scales[0], scales[1], num_shared, shape.held_if_some)
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
