"""`ExpertsMethod`: stores and multiplies the experts of a layer. `UnquantizedExperts` is the unquantised one."""

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aerie.kernels.experts.adapted.grouped import CELLS_OF_BLOCK, adapted_experts
from aerie.kernels.experts.adapted.product import ExpertAdapters
from aerie.kernels.experts.fused import FusedExperts, build_experts, fused_workspace_size, fuses
from aerie.kernels.experts.gated import SWIGLU, GatedActivation
from aerie.kernels.experts.grouped import Biases, check_experts, experts_one_by_one, grouped_experts, local_expert_ids
from aerie.kernels.experts.route import RouterLogits
from aerie.kernels.experts.weights import ExpertWeights
from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.span import Span
from aerie.workers.layers.linear_method import LinearMethod, LinearShape, Part, UnquantizedLinearMethod
from aerie.workers.layers.weighted import WeightMethod, check_plain, check_shape


def with_shared(experts: Tensor, shared: Tensor) -> Tensor:
    """Return [experts + shared, rows, columns]: `experts`, then `shared`. May reuse the memory of `experts`."""
    joined = with_room(experts, shared.shape[0])
    joined[experts.shape[0] :].copy_(shared)
    return joined


def with_room(experts: Tensor, num_shared: int) -> Tensor:
    """Return [experts + num_shared, rows, columns] that begins with `experts`, in the same memory if it is large
    enough. A new tensor after loading would waste a third of the weights' size by fragmentation (DeepSeek-V3)."""
    whole = (experts.shape[0] + num_shared, *experts.shape[1:])
    end = experts.storage_offset() + math.prod(whole)
    if experts.is_contiguous() and end * experts.itemsize <= experts.untyped_storage().nbytes():
        return experts.as_strided(whole, experts.stride())
    grown = experts.new_empty(whole)
    grown[: experts.shape[0]].copy_(experts)
    return grown


def shared_rows(mlp: Tensor, num_shared: int) -> Tensor:
    """Split the gate and up projections of the shared experts' MLP by expert.

    mlp: [num_shared * rows, columns], gate rows of all experts, then up rows.
    returns: [num_shared, rows, columns], gate, then up rows of each.
    """
    return mlp.view(2, num_shared, -1, mlp.shape[1]).transpose(0, 1).flatten(1, 2)


def shared_columns(mlp: Tensor, num_shared: int) -> Tensor:
    """Split the MLP's down projection by expert.

    mlp: [rows, num_shared * columns], or scales [rows, 1] of whole rows.
    """
    is_whole = mlp.shape[1] == 1
    columns = mlp.unsqueeze(1).expand(-1, num_shared, -1) if is_whole else mlp.view(mlp.shape[0], num_shared, -1)
    return columns.transpose(0, 1)


_ALIGNMENT = 16  # bytes; row alignment that torch's grouped GEMM needs


@dataclass(frozen=True)
class ExpertsShape:
    """The experts' weights on this rank.

    held: the routed experts of this rank.
    gate_up: gate_proj above up_proj, of one expert.
    down: down_proj of one expert.
    num_shared: shared experts that `ExpertsMethod.join` may append to the routed ones; every row uses them.
    experts_per_token: routed experts per row, over all ranks.
    biased: every matrix has a bias.
    """

    held: Span
    gate_up: LinearShape
    down: LinearShape
    num_shared: int = 0
    experts_per_token: int = 1
    activation: GatedActivation = SWIGLU
    biased: bool = False

    @property
    def num_experts(self) -> int:
        """Routed experts on this rank."""
        return self.held.size

    def stacked(self, matrix: LinearShape, dtype: torch.dtype) -> Tensor:
        """Allocate [num_experts, rows, columns] with spare memory after it for the shared experts
        (`aerie.workers.layers.experts_method.with_shared`)."""
        return torch.empty(self.num_experts + self.num_shared, matrix.out_features, matrix.in_features, dtype=dtype)[
            : self.num_experts
        ]

    @property
    def held_if_some(self) -> Span | None:
        """`held` if other ranks hold other experts, else None."""
        return self.held if self.held.size < self.held.total else None

    @property
    def size(self) -> int:
        return self.down.out_features

    @property
    def width(self) -> int:
        return self.down.in_features

    @property
    def parts(self) -> tuple[Part, ...]:
        return (*self.gate_up.parts, *self.down.parts)


class ExpertsMethod(WeightMethod):
    """The weights of a layer's experts. `finish` is called once.

    dtype: dtype of inputs and results.
    """

    def __init__(self, shape: ExpertsShape) -> None:
        super().__init__()
        self.shape, self.dtype = shape, torch.get_default_dtype()

    @abstractmethod
    def load(self, kind: str, expert: int, part: Part, full: Tensor) -> None:
        """Copy this rank's share of `full`, a whole tensor of the checkpoint.

        kind: one of `kinds`.
        expert: index on this rank.
        Raises WrongTensorError for a wrong shape or dtype.
        """

    def fill_missing(self, kind: str) -> bool:
        """See `aerie.workers.layers.weighted.WeightedModule.fill_missing`."""
        return False

    def join(self, gate_up: LinearMethod, down: LinearMethod, options: GEMMOptions) -> bool:
        """Append the shared experts to the routed ones, before `finish`; `multiply` then includes their output.

        Return False if their weights are stored or multiplied differently.
        """
        return False

    @property
    def is_fused(self) -> bool:
        """Whether `multiply` accepts experts that are chosen already (`RouterLogits.routed`)."""
        return False

    @abstractmethod
    def multiply(self, x: Tensor | Fp8Rows, router: RouterLogits, out: Tensor | None = None) -> Tensor:
        """Return this rank's part of each row's weighted sum of experts, including joined ones: [rows, hidden_size].

        x: [rows, hidden_size] in the model's dtype, or in the format `fp8_inputs`.
        out: memory for the result; None allocates it.
        A row's result does not depend on other rows.
        """

    def multiply_routed(self, x: Tensor | Fp8Rows, router: RouterLogits) -> Tensor:
        """Return `multiply` without joined experts."""
        return self.multiply(x, router)

    def routed_rows(self) -> list[int]:
        """Return numbers of rows that launch all kernels of `multiply_routed` that `multiply` does not launch."""
        return []

    @property
    def adapters_fault(self) -> str:
        """Why these weights have no `multiply_adapted`, with a remedy; "" if they have."""
        return f"experts stored as {self.format} take no adapters; use a checkpoint in bf16, or leave lora.experts out"

    def multiply_adapted(
        self, x: Tensor, router: RouterLogits, adapters: ExpertAdapters, out: Tensor | None = None
    ) -> Tensor:
        """Return `multiply_routed` of the experts with each row's adapters; unless `adapters_fault`."""
        raise NotImplementedError(self.adapters_fault)


class DenseExperts(ExpertsMethod):
    """Experts whose weights have the dtype of their inputs. Uses fused kernels where they fit, else torch."""

    _fused: FusedExperts | None = None
    _dense: tuple[Tensor, Tensor] | None = None  # dequantised weights, from `finish` on
    _has_tiles = False  # whether products have blocks of rows
    biases: Biases | None = None

    def dense_weights(self) -> tuple[Tensor, Tensor]:
        """Return gate_up [experts, 2 * width, hidden_size] and down [experts, hidden_size, width], joined experts
        last."""
        assert self._dense is not None, "finish comes first, and FP8 is multiplied elsewhere"
        return self._dense

    def workspace_size(self) -> tuple[int, int]:
        shape = self.shape
        return fused_workspace_size(shape.held, shape.num_shared, shape.experts_per_token, shape.size, shape.width)

    def finish(self, options: GEMMOptions) -> None:
        if options.workspace is None:
            return
        self._has_tiles = True
        fits = self._fuses(options)
        if options.deterministic and not fits:
            raise ValueError(
                f"deterministic=true: experts of {self.shape.size} inputs and a width of {self.shape.width} on each "
                "rank have no kernels with one order of sums on this GPU; set deterministic: false"
            )
        if fits:
            gate_up, down = self.dense_weights()
            num_shared = gate_up.shape[0] - self.shape.num_experts
            held, (gate_up_bias, down_bias) = self.shape.held_if_some, self.biases or (None, None)
            weights = ExpertWeights(
                gate_up,
                down,
                gate_up_scales=None,
                down_scales=None,
                num_shared=num_shared,
                held=held,
                gate_up_bias=gate_up_bias,
                down_bias=down_bias,
                activation=self.shape.activation,
            )
            self._fused = build_experts(weights, options, self.dtype)

    @property
    def is_fused(self) -> bool:
        return self._fused is not None

    @property
    def _is_plain(self) -> bool:
        return self.shape.activation == SWIGLU and not self.shape.biased

    def _fuses(self, options: GEMMOptions) -> bool:
        return fuses(self.shape.size, self.shape.width, options, self._is_plain)

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        return None if self._fused is None else self._fused.inputs

    def multiply_routed(self, x: Tensor | Fp8Rows, router: RouterLogits) -> Tensor:
        if self._fused is None:
            return self.multiply(x, router)
        check_experts(x, router, self.shape.size, self.dtype, self.fp8_inputs, None)
        return self._fused.without_shared().multiply(x, router, None)

    def routed_rows(self) -> list[int]:
        return [] if self._fused is None else self._fused.without_shared().variant_rows(self.shape.experts_per_token)

    def multiply(self, x: Tensor | Fp8Rows, router: RouterLogits, out: Tensor | None = None) -> Tensor:
        check_experts(x, router, self.shape.size, self.dtype, self.fp8_inputs, out)
        if self._fused is not None:
            return self._fused.multiply(x, router, out)
        assert isinstance(x, Tensor), "fp8_inputs is None"
        gate_up, down = self.dense_weights()
        aligned = all(matrix.shape[2] * matrix.element_size() % _ALIGNMENT == 0 for matrix in (gate_up, down))
        chosen, weight = router.choose()
        partly = self.shape.held_if_some is not None
        if partly:
            chosen = local_expert_ids(chosen, self.shape.held)
        activation, biases = self.shape.activation, self.biases
        if aligned:
            result = grouped_experts(x, chosen, weight, gate_up, down, partly, activation, biases)
        else:
            result = experts_one_by_one(x, chosen, weight, gate_up, down, activation, biases)
        return result if out is None else out.copy_(result)

    @property
    def adapters_fault(self) -> str:
        return ""

    def multiply_adapted(
        self, x: Tensor, router: RouterLogits, adapters: ExpertAdapters, out: Tensor | None = None
    ) -> Tensor:
        check_experts(x, router, self.shape.size, self.dtype, None, out)
        if self._fused is not None:
            return self._fused.multiply_adapted(x, router, adapters, out)
        gate_up, down = (matrix[: self.shape.num_experts] for matrix in self.dense_weights())
        chosen, weight = router.choose()
        chosen = local_expert_ids(chosen, self.shape.held)
        block_m = CELLS_OF_BLOCK if self._has_tiles else 1
        activation, biases = self.shape.activation, self.biases
        result = adapted_experts(x, chosen, weight, gate_up, down, adapters, block_m, activation, biases)
        return result if out is None else out.copy_(result)


class UnquantizedExperts(DenseExperts):
    """Weights in bfloat16, float16 or float32, with spare memory for joined experts.

    gate_up_bias, down_bias: [experts, rows]; None without. Ranks that share an expert sum its outputs, so only one of
        them holds down_bias; the others hold zeros.
    """

    def __init__(self, shape: ExpertsShape) -> None:
        super().__init__(shape)

        def stacked(matrix: LinearShape) -> nn.Parameter:
            return nn.Parameter(shape.stacked(matrix, self.dtype), requires_grad=False)

        def bias(matrix: LinearShape) -> nn.Parameter | None:
            empty = torch.empty(shape.num_experts, matrix.out_features)
            return nn.Parameter(empty, requires_grad=False) if shape.biased else None

        self.gate_up, self.down = stacked(shape.gate_up), stacked(shape.down)
        self.gate_up_bias, self.down_bias = bias(shape.gate_up), bias(shape.down)
        self.kinds = ("weight", "bias") if shape.biased else ("weight",)

    @property
    def biases(self) -> Biases | None:  # type: ignore[override]
        if self.gate_up_bias is None or self.down_bias is None:
            return None
        return self.gate_up_bias, self.down_bias

    def dense_weights(self) -> tuple[Tensor, Tensor]:
        return self.gate_up, self.down

    @property
    def reload_fault(self) -> str:
        return ""

    def join(self, gate_up: LinearMethod, down: LinearMethod, options: GEMMOptions) -> bool:
        if not isinstance(gate_up, UnquantizedLinearMethod) or not isinstance(down, UnquantizedLinearMethod):
            return False
        num_shared = self.shape.num_shared
        if not num_shared or not self._is_plain or not self._fuses(options):
            return False
        self.gate_up.data = with_shared(self.gate_up.data, shared_rows(gate_up.weight.data, num_shared))
        self.down.data = with_shared(self.down.data, shared_columns(down.weight.data, num_shared))
        if num_shared == 1:  # its matrices are the MLP's, so that one memory has both
            gate_up.weight.data, down.weight.data = self.gate_up.data[-1], self.down.data[-1]
        return True

    def load(self, kind: str, expert: int, part: Part, full: Tensor) -> None:
        check_plain(full)
        is_down = part in self.shape.down.parts
        if kind == "bias":
            check_shape(full, (part.rows.total,))
            self._load_bias(expert, part, full, is_down)
            return
        mine = self.down if is_down else self.gate_up
        mine.data[expert, part.offset : part.offset + part.rows.size].copy_(part.cut(full))

    def _load_bias(self, expert: int, part: Part, full: Tensor, is_down: bool) -> None:
        assert self.gate_up_bias is not None and self.down_bias is not None, "kinds includes it"
        if not is_down:
            rows = slice(part.offset, part.offset + part.rows.size)
            self.gate_up_bias.data[expert, rows].copy_(full[part.rows.first : part.rows.end])
        elif part.columns.first == 0:
            self.down_bias.data[expert].copy_(full)
        else:
            self.down_bias.data[expert].zero_()

    def fill_dummy(self, generator: torch.Generator) -> None:
        for parameter in (self.gate_up, self.down):
            parameter.data.normal_(0.0, 0.02, generator=generator)
        for bias in self.biases or ():
            bias.data.zero_()
