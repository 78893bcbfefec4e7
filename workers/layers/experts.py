"""The experts of a layer on this rank: a slice of every expert (tensor parallelism) or some whole experts (expert
parallelism). An `ExpertsMethod` stores and multiplies them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from aerie.kernels.experts.gated import SWIGLU, GatedActivation
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.span import Span
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.experts_method import ExpertsMethod, ExpertsShape, UnquantizedExperts
from aerie.workers.layers.linear import rank_span
from aerie.workers.layers.linear_method import LinearShape
from aerie.workers.layers.weighted import WeightedModule, WeightKey


class Experts(WeightedModule):
    """The experts of a layer.

    method: unquantised at construction; may be replaced before weights are loaded.
    """

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
        activation: GatedActivation = SWIGLU,
        biased: bool = False,
    ) -> None:
        """width: intermediate size of an expert in the model.
        num_shared, biased: see `ExpertsShape`.
        whole: whether this rank has some whole experts; else a slice of each expert.
        """
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
            activation,
            biased,
        )
        self.method = UnquantizedExperts(self.shape)

    def workspace_size(self) -> tuple[int, int]:
        return self.method.workspace_size()

    def weight_keys(self) -> Iterator[WeightKey]:
        for expert in range(self.shape.held.total):  # all ranks' keys, so that all ranks fail alike
            for part in self.shape.parts:
                for kind in self.method.kinds:
                    yield WeightKey(kind, part.name, expert)

    def load(self, key: WeightKey, full: Tensor) -> None:
        part = next(part for part in self.shape.parts if part.name == key.part)
        assert key.expert is not None
        held = self.shape.held
        if held.first <= key.expert < held.end:
            self.method.load(key.kind, key.expert - held.first, part, full)

    def fill_missing(self, key: WeightKey) -> bool:
        return self.method.fill_missing(key.kind)

    def fill_dummy(self, generator: torch.Generator) -> None:
        self.method.fill_dummy(generator)

    def finish(self, options: GEMMOptions) -> None:
        self.method.finish(options)

    @property
    def reload_fault(self) -> str:
        return self.method.reload_fault
