"""The experts of a layer in stacked tensors: a slice of the width of each, or some of them whole. How the tensors are
kept and multiplied by is their `ExpertsMethod`'s, as a linear layer's is its `LinearMethod`'s."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.distributed.tp_group import TPGroup
from workers.layers.linear import rank_span
from workers.layers.linear_method import LinearMethod, LinearShape, Part, UnquantizedLinearMethod, check_plain
from workers.layers.weighted import WeightedModule, WeightKey
from workers.ops.activation import silu_mul
from workers.ops.experts.fused import FusedExperts, choose_experts, fused_workspace_size, fuses
from workers.ops.experts.route import RouterLogits
from workers.ops.experts.shared import shared_columns, shared_rows, with_shared
from workers.ops.experts.weights import ExpertWeights
from workers.ops.fp8.rows import Fp8Inputs, Fp8Rows
from workers.ops.gemm.workspace import GEMMOptions
from workers.span import Span

_ALIGNMENT = 16  # bytes; of the rows of what torch's grouped products read


@dataclass(frozen=True)
class ExpertsShape:
    """On this rank.

    held: of the experts that rows are routed to; a row goes to experts_per_token of all.
    num_shared: that every row goes to, which may be joined.
    gate_up: of one expert, gate_proj and up_proj one below the other. down: its down_proj.
    """

    held: Span
    gate_up: LinearShape
    down: LinearShape
    num_shared: int = 0
    experts_per_token: int = 1

    @property
    def num_experts(self) -> int:
        """Without shared ones."""
        return self.held.size

    def stacked(self, one: LinearShape, dtype: torch.dtype) -> Tensor:
        """[num_experts, rows, columns] for a matrix of each expert, at the beginning of memory that has room for shared
        ones (`workers.ops.experts.shared.with_shared`)."""
        return torch.empty(self.num_experts + self.num_shared, one.out_features, one.in_features, dtype=dtype)[
            : self.num_experts
        ]

    @property
    def held_if_some(self) -> Span | None:
        """None if no other rank has others."""
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


class ExpertsMethod(nn.Module, ABC):
    """The weights of all experts of a layer and what is done with them; lives as a `LinearMethod` does.

    kinds: what the checkpoint has of each matrix of each expert.
    """

    kinds: tuple[str, ...] = ("weight",)

    def __init__(self, shape: ExpertsShape) -> None:
        super().__init__()
        self.shape = shape

    @abstractmethod
    def load(self, kind: str, expert: int, part: Part, full: Tensor) -> None:
        """Take this rank's share of the whole tensor `full`, which the checkpoint has as `kind` of a matrix of an
        expert, numbered as on this rank. Raises WrongTensorError if its shape or type is another one."""

    @abstractmethod
    def fill_dummy(self, generator: torch.Generator) -> None:
        """See `workers.layers.weighted.WeightedModule.fill_dummy`."""

    @abstractmethod
    def finish(self, options: GEMMOptions) -> None:
        """Once, when the weights are final and before they are multiplied by."""

    def join(self, gate_up: LinearMethod, down: LinearMethod, options: GEMMOptions) -> bool:
        """Before `finish`: take the weights of the MLP that all shared experts together are in the checkpoint, so that
        `multiply` adds it; False where the two are not kept alike, or are multiplied otherwise."""
        return False

    def workspace_size(self) -> tuple[int, int]:
        """See `workers.layers.weighted.WeightedModule.workspace_size`."""
        return 0, 0

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        """In which form `multiply` takes rows beside the model's type, if in any."""
        return None

    @abstractmethod
    def multiply(self, x: Tensor | Fp8Rows, router: RouterLogits, out: Tensor | None = None) -> Tensor:
        """[rows, hidden_size] this rank's part of the weighted sum of each row's experts, and of what was joined, for x
        [rows, hidden_size], in the model's type or as `fp8_inputs` says; in the memory `out` if it is given. Rows do
        not touch each other."""


class DenseExperts(ExpertsMethod):
    """Multiplies by weights in the type of its inputs, wherever they are kept: by kernels of ours where they fit, else
    by torch's."""

    _fused: FusedExperts | None = None

    @abstractmethod
    def dense_weights(self) -> tuple[Tensor, Tensor]:
        """gate_up [experts, 2 * width, hidden_size] and down [experts, hidden_size, width], and of joined
        ones after them."""

    def workspace_size(self) -> tuple[int, int]:
        shape = self.shape
        return fused_workspace_size(shape.held, shape.num_shared, shape.experts_per_token, shape.size, shape.width)

    def finish(self, options: GEMMOptions) -> None:
        if options.workspace is None:
            return
        fits = fuses(self.shape.size, self.shape.width, options)
        assert fits or not options.deterministic, "refused at start"
        if fits:
            gate_up, down = self.dense_weights()
            num_shared = gate_up.shape[0] - self.shape.num_experts
            weights = ExpertWeights(gate_up, down, num_shared=num_shared, held=self.shape.held_if_some)
            self._fused = choose_experts(weights, options, gate_up.dtype)

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        return None if self._fused is None else self._fused.inputs

    def multiply(self, x: Tensor | Fp8Rows, router: RouterLogits, out: Tensor | None = None) -> Tensor:
        if self._fused is not None:
            return self._fused.multiply(x, router, out)
        assert isinstance(x, Tensor), "asked for no other form"
        gate_up, down = self.dense_weights()
        aligned = all(matrix.shape[2] * matrix.element_size() % _ALIGNMENT == 0 for matrix in (gate_up, down))
        chosen, weight = router.choose()
        partly = self.shape.held_if_some is not None
        if partly:
            chosen = numbered_here(chosen, self.shape.held)
        if aligned:
            result = grouped_experts(x, chosen, weight, gate_up, down, partly)
        else:
            result = experts_one_by_one(x, chosen, weight, gate_up, down)
        return result if out is None else out.copy_(result)


class UnquantizedExperts(DenseExperts):
    """Weights of its own, in bfloat16, float16 or float32, with room for those that may be joined."""

    def __init__(self, shape: ExpertsShape) -> None:
        super().__init__(shape)

        def stacked(one: LinearShape) -> nn.Parameter:
            return nn.Parameter(shape.stacked(one, torch.get_default_dtype()), requires_grad=False)

        self.gate_up, self.down = stacked(shape.gate_up), stacked(shape.down)

    def dense_weights(self) -> tuple[Tensor, Tensor]:
        return self.gate_up, self.down

    def join(self, gate_up: LinearMethod, down: LinearMethod, options: GEMMOptions) -> bool:
        if not isinstance(gate_up, UnquantizedLinearMethod) or not isinstance(down, UnquantizedLinearMethod):
            return False
        num_shared = self.shape.num_shared
        if not num_shared or not fuses(self.shape.size, self.shape.width, options):
            return False
        self.gate_up.data = with_shared(self.gate_up.data, shared_rows(gate_up.weight.data, num_shared))
        self.down.data = with_shared(self.down.data, shared_columns(down.weight.data, num_shared))
        return True

    def load(self, kind: str, expert: int, part: Part, full: Tensor) -> None:
        check_plain(full)
        mine = self.down if part in self.shape.down.parts else self.gate_up
        mine.data[expert, part.offset : part.offset + part.rows.size].copy_(part.cut(full))

    def fill_dummy(self, generator: torch.Generator) -> None:
        for parameter in (self.gate_up, self.down):
            parameter.data.normal_(0.0, 0.02, generator=generator)


class Experts(WeightedModule):
    """method: unquantised when the layer is made; another may be put in its place before it is filled."""

    method: ExpertsMethod

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        width: int,
        group: TPGroup,
        experts_per_token: int,
        num_shared: int = 0,
        whole: bool = False,
    ) -> None:
        """width: an expert's intermediate size in the model. num_shared: experts whose weights may be joined. whole: a
        rank has some experts and all of them, else a slice of each."""
        super().__init__()
        hidden, held, span = Span.whole(hidden_size), Span.whole(num_experts), Span.whole(width)
        if whole:
            held = rank_span(num_experts, group, "num_experts")
        else:
            span = rank_span(width, group, "moe_intermediate_size")
        self.shape = ExpertsShape(
            held,
            LinearShape.stacked([("gate_proj", span), ("up_proj", span)], hidden),
            LinearShape.stacked([("down_proj", hidden)], span),
            num_shared,
            experts_per_token,
        )
        self.method = UnquantizedExperts(self.shape)

    def workspace_size(self) -> tuple[int, int]:
        return self.method.workspace_size()

    def weight_keys(self) -> Iterator[WeightKey]:
        for expert in range(self.shape.held.total):  # other ranks' too: what a checkpoint lacks, all ranks miss
            for part in self.shape.parts:
                for kind in self.method.kinds:
                    yield WeightKey(kind, part.name, expert)

    def load(self, key: WeightKey, full: Tensor) -> None:
        part = next(part for part in self.shape.parts if part.name == key.part)
        assert key.expert is not None
        held = self.shape.held
        if held.first <= key.expert < held.end:
            self.method.load(key.kind, key.expert - held.first, part, full)

    def fill_dummy(self, generator: torch.Generator) -> None:
        self.method.fill_dummy(generator)

    def finish(self, options: GEMMOptions) -> None:
        self.method.finish(options)


def numbered_here(chosen: Tensor, held: Span) -> Tensor:
    """chosen: of the model's experts. Those that other ranks have all get the number after this rank's last."""
    is_here = (chosen >= held.first) & (chosen < held.end)
    return torch.where(is_here, chosen - held.first, held.size)


def grouped_experts(
    x: Tensor, chosen: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, partly: bool = False
) -> Tensor:
    """See `ExpertsMethod.multiply`; gate_up, down: as `DenseExperts.dense_weights` gives them, of any type. partly:
    chosen may have numbers after theirs, which count for nothing. Rows are sorted by expert, and each of the two
    products is one call. On a GPU of compute capability 9.0 in bfloat16 nothing
    waits for the device; elsewhere torch 2.13 multiplies one expert after the other, and reads their rows' numbers."""
    num_rows, k = chosen.shape
    experts, order = chosen.flatten().sort(stable=True)
    numbers = torch.arange(gate_up.shape[0], device=x.device)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    hidden = silu_mul(F.grouped_mm(x.index_select(0, order // k), gate_up.transpose(1, 2), offs=ends))
    outputs = F.grouped_mm(hidden, down.transpose(1, 2), offs=ends)
    by_row = torch.empty_like(outputs).index_copy_(0, order, outputs).view(num_rows, k, -1)
    if partly:  # what was multiplied by nothing is what its memory was
        by_row = by_row.masked_fill((chosen == gate_up.shape[0]).unsqueeze(-1), 0.0)
    return (by_row.float() * weight.unsqueeze(-1)).sum(1).to(x.dtype)


def experts_one_by_one(x: Tensor, chosen: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The same for weights of any size: every row through every expert, and counted where it was chosen."""
    out = x.new_zeros(x.shape, dtype=torch.float32)
    for expert in range(gate_up.shape[0]):
        mine = chosen == expert
        part = F.linear(silu_mul(F.linear(x, gate_up[expert])), down[expert]).float()
        share = torch.where(mine, weight, 0.0).sum(-1, keepdim=True)
        out += torch.where(mine.any(-1, keepdim=True), part * share, 0.0)
    return out.to(x.dtype)
