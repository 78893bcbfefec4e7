"""Stacked experts whose weights are FP8. There is no product of such experts here yet, so `finish` makes what they
mean, in the model's type; blocks that ranks cut in two are no matter therefore."""

import torch
from torch import Tensor, nn

from workers.layers.experts import DenseExperts, ExpertsShape
from workers.layers.gemm import GEMMOptions
from workers.layers.linear_method import LinearShape, Part
from workers.layers.quantization.fp8_weight import (
    DUMMY_SCALE,
    FP8,
    Fp8Scheme,
    checked,
    dequantised,
    empty,
    fill_dummy,
    rows_of,
)
from workers.layers.weighted import check_shape


class Fp8Experts(DenseExperts):
    """weights: gate_up and down of all experts, float8_e4m3fn, until they are finished. scales: by matrix, of all
    experts, float32 [experts, scales of rows, scales of columns]."""

    def __init__(self, shape: ExpertsShape, scheme: Fp8Scheme) -> None:
        super().__init__(shape)
        self.kinds = ("weight", scheme.kind)
        self.scheme, self._dtype = scheme, torch.get_default_dtype()
        self.weights = nn.ParameterList(
            empty(shape.num_experts, one.out_features, one.in_features, dtype=FP8)
            for one in (shape.gate_up, shape.down)
        )
        self.scales = nn.ParameterDict(
            {part.name: empty(shape.num_experts, *scheme.num_scales(part), dtype=torch.float32) for part in shape.parts}
        )
        self._dense: tuple[Tensor, Tensor] | None = None

    def dense_weights(self) -> tuple[Tensor, Tensor]:
        assert self._dense is not None, "finish comes first"
        return self._dense

    def load(self, kind: str, expert: int, part: Part, full: Tensor) -> None:
        if kind == "weight":
            mine = self.weights[0 if part in self.shape.gate_up.parts else 1]
            rows_of(mine.data[expert], part).copy_(part.cut(checked(full)))
        else:
            check_shape(full, self.scheme.num_scales(part))
            self.scales[part.name].data[expert].copy_(full)

    def fill_dummy(self, generator: torch.Generator) -> None:
        for weights in self.weights:
            for expert in weights.data:
                fill_dummy(expert, generator)
        for scale in self.scales.values():
            scale.data.fill_(DUMMY_SCALE)

    def finish(self, options: GEMMOptions) -> None:
        if self._dense is None:
            gate_up, down = self.weights
            shape = self.shape
            self._dense = self._all_dequantised(gate_up, shape.gate_up), self._all_dequantised(down, shape.down)
            self.weights = nn.ParameterList()
        super().finish(options)

    def _all_dequantised(self, weights: Tensor, shape: LinearShape) -> Tensor:
        """Expert by expert: scales of all, as large as the weights, would take four times their memory."""
        dense = torch.empty(weights.shape, dtype=self._dtype, device=weights.device)
        for part in shape.parts:
            block = self.scheme.block_of(part)
            for expert in range(self.shape.num_experts):
                mine, scale = rows_of(weights[expert], part), self.scales[part.name].data[expert]
                rows_of(dense[expert], part).copy_(dequantised(mine, scale, part, block, self._dtype))
        return dense
