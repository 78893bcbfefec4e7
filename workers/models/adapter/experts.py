"""Aerie's experts in a transformers model; the model's router or Aerie's chooses them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aerie.kernels.experts.gated import GatedActivation
from aerie.kernels.experts.route import RouterLogits, Routing
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.experts import Experts
from aerie.workers.layers.experts_method import UnquantizedExperts
from aerie.workers.models.adapter.layers import Leaf, own_tensors

_UNLIKELY = -1e30  # logit of an expert that is not chosen; its softmax is 0
_LEAST_WEIGHT = 1e-30  # minimum weight of a chosen expert
_MAX_GATHERED_BYTES = 1 << 28  # bound on the weights gathered at once


@dataclass(frozen=True)
class _Given:
    """Experts that the model's own router has chosen; used instead of `RouterLogits`."""

    chosen: Tensor
    weight: Tensor

    def check(self, rows: int) -> None:
        assert self.chosen.shape == self.weight.shape and self.chosen.shape[0] == rows

    def choose(self) -> tuple[Tensor, Tensor]:
        return self.chosen, self.weight


class GivenExperts(Experts):
    """Experts that the model's own router chooses, or a `aerie.workers.models.adapter.routers.MatchedRouter`.

    experts: transformers' module with stacked weights, and its `activation`.
    experts_per_token: experts that the router chooses for a row.
    is_routed: whether the router is a `MatchedRouter`.
    """

    def __init__(
        self,
        experts: nn.Module,
        activation: GatedActivation,
        group: TPGroup,
        experts_per_token: int,
        is_routed: bool,
    ) -> None:
        stacked: Tensor = experts.down_proj  # type: ignore[assignment]
        num_experts, hidden, width = stacked.shape
        super().__init__(num_experts, hidden, width, group, experts_per_token, activation=activation)
        self._group, self._is_routed = group, is_routed
        self._routing = Routing(self.shape.held.total, experts_per_token, normalise=True)

    def forward(self, x: Tensor, chosen: Tensor | RouterLogits, weight: Tensor | RouterLogits) -> Tensor:
        """Return the weighted sum of experts. x: [..., hidden_size]. chosen: [rows, experts of a token] int64. weight:
        [rows, experts of a token], not negative. If `is_routed`, both are the router's logits."""
        rows = x.flatten(0, -2)
        if isinstance(chosen, RouterLogits) or isinstance(weight, RouterLogits):
            assert isinstance(chosen, RouterLogits), "a router returns them in both places"
            return self._group.all_reduce(self.method.multiply(rows, chosen)).view(x.shape)
        weight = weight.float()
        if isinstance(self.method, UnquantizedExperts):
            part = self.method.multiply(rows, _Given(chosen, weight))  # type: ignore[arg-type]
        else:
            part = self.method.multiply(rows, logits_of(chosen, weight, self._routing))
            part = (part * weight.sum(-1, keepdim=True)).to(x.dtype)
        return self._group.all_reduce(part).view(x.shape)

    def finish(self, options: GEMMOptions) -> None:
        """Finish the weights, unless they are unquantised and multiplied by `_Given`."""
        if self._is_routed or not isinstance(self.method, UnquantizedExperts):
            super().finish(options)
        elif options.deterministic:
            raise ValueError(
                "deterministic=true: Aerie does not know this model's router, so the sums of its experts depend on the "
                "batch; set deterministic: false"
            )


class GatheringExperts(Leaf):
    """Experts for which Aerie has no operation. transformers gathers the weights of each row's experts, so a pass of
    many rows is computed in parts."""

    def forward(self, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        """Return the weighted sum of experts. x: [rows, hidden_size]. chosen, weight: [rows, experts of a token]."""
        forward: Callable[..., Tensor] = super().forward
        expert_bytes = sum(tensor[0].nbytes for _, tensor in own_tensors(self))
        rows = max(1, _MAX_GATHERED_BYTES // (expert_bytes * chosen.shape[1]))
        parts = zip(*(torch.split(each, rows) for each in (x, chosen, weight)), strict=True)
        return forward(x, chosen, weight) if rows >= x.shape[0] else torch.cat([forward(*part) for part in parts])


def logits_of(chosen: Tensor, weight: Tensor, routing: Routing) -> RouterLogits:
    """Return logits from which `routing` chooses these experts, with these weights over their sum. Kernels for
    quantised experts choose from logits.

    chosen: [rows, experts of a token] int64.
    weight: [rows, experts of a token] float32, not negative.
    """
    others = weight.new_full((weight.shape[0], routing.num_experts), _UNLIKELY)
    return RouterLogits(others.scatter(1, chosen, weight.clamp(min=_LEAST_WEIGHT).log()), None, routing)
