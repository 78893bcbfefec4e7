"""Stacked experts with low-bit weights: stored in the checkpoint's format until `finish`, then packed expert by
expert."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from aerie.kernels.experts.adapted.product import ExpertAdapters
from aerie.kernels.experts.route import RouterLogits
from aerie.kernels.experts.weights import ExpertSizes
from aerie.kernels.fp8.rows import Fp8Rows
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.packed.adapted_experts import packed_adapted_experts
from aerie.kernels.packed.expert_tiles import packed_expert_workspace
from aerie.kernels.packed.experts import PackedExpertWeights, packed_expert_products, unserved, with_raised_scales
from aerie.kernels.packed.weight import TILE, PackedWeight
from aerie.workers.layers.experts_method import ExpertsMethod, ExpertsShape
from aerie.workers.layers.linear_method import Part
from aerie.workers.layers.weighted import check_plain, check_shape
from aerie.workers.quantization.packed_linear import MatrixCodes, PackedScheme, packed_below, with_rows

BIAS = "bias"


class PackedExperts(ExpertsMethod):
    """Stacked experts with low-bit weights.

    scheme: the checkpoint's format. It names the kinds of tensors that a matrix consists of, such as codes and scales,
        and allocates them.
    kinds: those kinds, the ones that a checkpoint may have without effect, and BIAS for experts with biases.
    stored: tensors of all experts, [experts, ...] by part (gate, up or down projection) and kind; empty after `finish`.
    biases: [experts, rows] of each part on this rank, in the model's dtype; empty without.

    A rank has whole groups of the down projection, and a width that is a multiple of 64. Gate and up rows are padded
    with zeros, so that the inner activations there are zero.
    """

    def __init__(self, shape: ExpertsShape, scheme: PackedScheme) -> None:
        super().__init__(shape)
        self.scheme = scheme
        self.kinds = (*scheme.kinds, *scheme.unused, *((BIAS,) if shape.biased else ()))
        self.stored = nn.ParameterDict(
            {
                _key(part, kind): _parameter(empty.expand(shape.num_experts, *empty.shape).contiguous())
                for part in shape.parts
                for kind, empty in scheme.storage(part).items()
            }
        )
        self.biases = nn.ParameterDict(
            {
                part.name: _parameter(torch.empty(shape.num_experts, part.rows.size))
                for part in shape.parts
                if shape.biased
            }
        )
        self._weights: PackedExpertWeights | None = None
        self._options = GEMMOptions()

    @property
    def format(self) -> str:
        return str(self.scheme)

    def num_bytes(self, options: GEMMOptions) -> int:
        shape = self.shape
        sizes = ((2 * self._width, shape.size), (shape.size, self._width))
        biases = sum(int(bias.numel()) * 4 for bias in self.biases.values())
        return biases + sum(self.scheme.packed_bytes(*size, shape.num_experts) for size in sizes)

    def load(self, kind: str, expert: int, part: Part, full: Tensor) -> None:
        if kind == BIAS:
            check_plain(full)
            check_shape(full, (part.rows.total,))
            self.biases[part.name].data[expert].copy_(full[part.rows.first : part.rows.end])
        elif kind in self.scheme.kinds:
            stored = self.stored[_key(part, kind)]
            if kind in self.scheme.any_float and stored.dtype != full.dtype:
                stored.data = stored.data.to(
                    full.dtype if expert == 0 else torch.promote_types(stored.dtype, full.dtype)
                )
            self.scheme.copy(kind, part, full, stored.data[expert])

    def fill_missing(self, kind: str) -> bool:
        return kind in self.scheme.unused

    def fill_dummy(self, generator: torch.Generator) -> None:
        for part in self.shape.parts:
            self.scheme.dummy(self._matrix(part), part.columns.total, generator)
            if part.name in self.biases:
                self.biases[part.name].data.zero_()

    def finish(self, options: GEMMOptions) -> None:
        """Pack the stored matrices for the kernels, pad every expert's width to whole tiles, and free the stored
        ones."""
        if self._weights is not None:
            return
        shape, (down,) = self.shape, self.shape.down.parts
        first, width = down.columns.first - self.scheme.widened(down.columns).first, self._width
        gate_up = self._packed(shape.gate_up.parts, lambda matrix: with_rows(matrix, first, width))
        weights = self._packed(shape.down.parts, lambda matrix: _with_columns(matrix, self.scheme.group, width))
        gate_up_bias = down_bias = None
        if shape.biased:
            biases = [self.biases[part.name].data.float() for part in shape.gate_up.parts]
            gate_up_bias = torch.cat(
                [nn.functional.pad(bias, (first, width - first - bias.shape[1])) for bias in biases], 1
            )
            # because the ranks' parts are summed
            down_bias = self.biases[down.name].data.float() if down.columns.first == 0 else None
        self._weights = PackedExpertWeights(
            gate_up, weights, gate_up_bias, down_bias, shape.activation, shape.held_if_some
        )
        if options.workspace is not None:
            reason = unserved(self._weights, self.dtype)
            if reason is not None:
                raise ValueError(f"experts of few bits on a GPU: {reason}; use another checkpoint, or dtype: bfloat16")
            self._weights = with_raised_scales(self._weights)
        self._options, self.stored, self.biases = options, nn.ParameterDict(), nn.ParameterDict()

    @property
    def _width(self) -> int:
        columns = self.scheme.widened(self.shape.down.parts[0].columns)
        return -(-columns.size // TILE) * TILE

    @property
    def is_fused(self) -> bool:
        return self._options.workspace is not None and self._weights is not None

    def workspace_size(self) -> tuple[int, int]:
        shape = self.shape
        elsewhere = shape.held.total - shape.held.size
        sizes = ExpertSizes(
            shape.num_experts,
            0,
            experts_per_token=shape.experts_per_token,
            size=shape.size,
            width=self._width,
            step=TILE,
            num_elsewhere=elsewhere,
        )
        return packed_expert_workspace(sizes)

    def _packed(self, parts: tuple[Part, ...], padded: Callable[[MatrixCodes], MatrixCodes]) -> PackedWeight:
        """Pack expert by expert, which bounds the scratch memory."""
        whole: PackedWeight | None = None
        for expert in range(self.shape.num_experts):
            matrices = [padded(self.scheme.read(self._matrix(part, expert))) for part in parts]
            packed = packed_below(matrices, self.scheme)
            if whole is None:
                whole = _room_for(packed, self.shape.num_experts)
            _copy(packed, whole.expert(expert))
        assert whole is not None, "there is an expert"
        return whole

    def _matrix(self, part: Part, expert: int | None = None) -> dict[str, Tensor]:
        every = {kind: self.stored[_key(part, kind)].data for kind in self.scheme.kinds}
        return every if expert is None else {kind: tensor[expert] for kind, tensor in every.items()}

    def multiply(self, x: Tensor | Fp8Rows, router: RouterLogits, out: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor), "fp8_inputs is None"
        assert self._weights is not None, "call finish first"
        return packed_expert_products(x, router, self._weights, self._options, out)

    @property
    def adapters_fault(self) -> str:
        first = self.shape.down.parts[0].columns.first - self.scheme.widened(self.shape.down.parts[0].columns).first
        if first == 0 and self._width == self.shape.width:
            return ""
        return (
            f"experts stored as {self.format} take adapters if {TILE} and the groups of a scale divide their width on "
            f"each rank, which is {self.shape.width}; change parallel.tensor_parallel or leave lora.experts out"
        )

    def multiply_adapted(
        self, x: Tensor, router: RouterLogits, adapters: ExpertAdapters, out: Tensor | None = None
    ) -> Tensor:
        assert self._weights is not None, "call finish first"
        return packed_adapted_experts(x, router, self._weights, adapters, self._options, out)


def _key(part: Part, kind: str) -> str:
    return f"{part.name}-{kind}"


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _with_columns(matrix: MatrixCodes, group: int | None, num_columns: int) -> MatrixCodes:
    """Return `matrix` with `num_columns`. Added columns have zero codes and scales; their inputs are zeros."""
    num_groups = 1 if group is None else num_columns // group

    def padded(tensor: Tensor, columns: int) -> Tensor:
        return nn.functional.pad(tensor, (0, columns - tensor.shape[1]))

    zeros = None if matrix.zeros is None else padded(matrix.zeros, num_groups)
    codes, scales = padded(matrix.codes, num_columns), padded(matrix.scales, num_groups)
    return MatrixCodes(codes, scales, zeros, matrix.row_scale)


def _room_for(weight: PackedWeight, num_experts: int) -> PackedWeight:
    """Allocate the weights of `num_experts` experts, each as large as `weight`."""

    def room(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.new_empty((num_experts, *tensor.shape))

    codes, scales = room(weight.codes), room(weight.scales)
    assert codes is not None and scales is not None
    return replace(weight, codes=codes, scales=scales, zeros=room(weight.zeros), row_scale=room(weight.row_scale))


def _copy(weight: PackedWeight, out: PackedWeight) -> None:
    """Copy a packed weight into the memory of another one of the same shape."""
    pairs = (
        (weight.codes, out.codes),
        (weight.scales, out.scales),
        (weight.zeros, out.zeros),
        (weight.row_scale, out.row_scale),
    )
    for source, target in pairs:
        if source is not None and target is not None:
            target.copy_(source)
