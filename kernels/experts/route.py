"""Chooses the experts of each row and their weights. Shapes do not depend on values, so CUDA graphs can capture it."""

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

from aerie.kernels.collectives.all_reduce import sum_in_order

NO_EXPERT = -1  # for padding rows and experts of other ranks
MAX_LISTED = 16  # maximum rows for which the used experts are listed
_ALIGNMENT = 16  # elements; kernels are compiled for row strides that are multiples of this
SCORINGS = ("softmax", "sigmoid")


@dataclass(frozen=True)
class Routing:
    """The rule by which a row's experts are chosen from its logits.

    experts_per_token: routed experts per row.
    scoring: one of `SCORINGS`, over float32 logits.
    num_groups: groups of equal size; experts are chosen only from the best `groups_per_token` groups.
    best_of_group: a group's score is the sum of its `best_of_group` highest scores.
    has_bias: scores have a bias that affects the choice but not the weights (arXiv 2412.19437, section 2.1.2).
    normalise: divide a row's weights by their sum. `scale` multiplies them afterwards.
    shared_gate: whether the router has one more logit, whose sigmoid is the weight of shared experts.
    biased_logits: the router GEMM has a bias (gpt-oss).
    scales_experts: whether a factor per expert multiplies the final weights (Gemma 4).

    The softmax of the chosen logits alone (gpt-oss, Mixtral) is softmax scoring with `normalise`.
    """

    num_experts: int
    experts_per_token: int
    scoring: str = "softmax"
    num_groups: int = 1
    groups_per_token: int = 1
    best_of_group: int = 1
    has_bias: bool = False
    normalise: bool = False
    scale: float = 1.0
    shared_gate: bool = False
    biased_logits: bool = False
    scales_experts: bool = False

    @property
    def num_logits(self) -> int:
        """Logits of a row: one per expert; with a shared gate, its logit and padding that keeps rows aligned."""
        return -(-(self.num_experts + 1) // _ALIGNMENT) * _ALIGNMENT if self.shared_gate else self.num_experts

    def check(self, source: str) -> None:
        """Raise ValueError, naming `source`, for an impossible combination."""
        if self.scoring not in SCORINGS:
            raise ValueError(f"{source}: scoring_func={self.scoring!r} is not supported; it is one of {SCORINGS}")
        if self.num_experts % self.num_groups:
            raise ValueError(f"{source}: n_group={self.num_groups} does not divide the {self.num_experts} experts")
        size = self.num_experts // self.num_groups
        if not 1 <= self.groups_per_token <= self.num_groups or size < self.best_of_group:
            raise ValueError(
                f"{source}: topk_group={self.groups_per_token} of n_group={self.num_groups} with {size} experts each "
                "cannot be chosen from"
            )
        if not 1 <= self.experts_per_token <= self.groups_per_token * size:
            raise ValueError(
                f"{source}: num_experts_per_tok={self.experts_per_token}: must be 1 to the "
                f"{self.groups_per_token * size} experts that a token may choose from"
            )


@dataclass(frozen=True)
class TokenSlots:
    """Marks the padding rows of a pass, by their KV slots on the dummy page.

    slots: [rows] int64 KV slots of the rows.
    first: the first slot after the dummy page.
    """

    slots: Tensor
    first: int


@dataclass(frozen=True)
class RouterLogits:
    """The input of the routing.

    values: float32 [rows, num_logits], or partial sums [parts, rows, num_logits], to be added in order.
    bias: float32 [num_experts] if the routing has one.
    live: marks padding rows; None without padding, or if it may use any experts.
    expert_scales: float32 [num_experts] if the routing scales experts.
    routed: the chosen experts, if `aerie.kernels.experts.norm_route` has chosen them.
    """

    values: Tensor
    bias: Tensor | None
    routing: Routing
    live: TokenSlots | None = None
    expert_scales: Tensor | None = None
    routed: "Routed | None" = None

    def check(self, rows: int) -> None:
        """Assert what the kernels require of the logits, or of the chosen experts, of `rows` rows."""
        if self.routed is not None:
            chosen, weight = self.routed.chosen, self.routed.weight
            assert chosen.shape == weight.shape and chosen.shape[0] == rows
            assert chosen.is_contiguous() and weight.is_contiguous() and weight.dtype == torch.float32
            return
        values, routing = self.values, self.routing
        assert values.dtype == torch.float32 and values.is_contiguous() and 2 <= values.dim() <= 3
        assert values.shape[-2:] == (rows, routing.num_logits) and (self.bias is not None) == routing.has_bias
        for tensor in (self.bias, self.expert_scales):
            if tensor is not None:
                assert (
                    tensor.shape == (routing.num_experts,) and tensor.is_contiguous() and tensor.dtype == torch.float32
                )
        if self.live is not None:
            slots = self.live.slots
            assert slots.shape == (rows,) and slots.dtype == torch.int64 and slots.is_contiguous()

    def choose(self) -> tuple[Tensor, Tensor]:
        """Return `route` of these logits, with scaled weights. Ignores `live`."""
        chosen, weight = route(self.logits()[:, : self.routing.num_experts], self.bias, self.routing)
        return chosen, weight if self.expert_scales is None else weight * self.expert_scales[chosen]

    def shared_gate(self) -> Tensor:
        """Return the logit of the shared experts' weight: [rows, 1] float32."""
        return self.logits()[:, self.routing.num_experts : self.routing.num_experts + 1]

    def logits(self) -> Tensor:
        """Return `values` without parts: [rows, num_logits] float32."""
        parts = self.values
        return parts if parts.dim() == 2 else sum_in_order(parts.flatten(1)).view(parts.shape[1:])


@dataclass(frozen=True)
class Routed:
    """The experts of each row.

    chosen: [rows, slots] int32 indices of experts on this rank, shared ones (numbered last) at the end; NO_EXPERT for
        padding rows and for experts of other ranks.
    weight: [rows, slots] float32; 1 for shared experts without a gate, 0 for NO_EXPERT.

    With up to MAX_LISTED rows the used experts are listed, else None:
    used: [max used] int32 experts in ascending order, then NO_EXPERT.
    num_used: [1] int32.

    With more rows they are counted, else None:
    rank: [rows, slots] int32 index of the row among its expert's rows, in arbitrary order; undefined for NO_EXPERT.
    count: [experts] int32 rows per expert; must be zeroed before the next launch.
    """

    chosen: Tensor
    weight: Tensor
    used: Tensor | None = None
    num_used: Tensor | None = None
    rank: Tensor | None = None
    count: Tensor | None = None

    @staticmethod
    def empty(rows: int, slots: int, most: int, device: torch.device) -> "Routed":
        """Return uninitialised choices of `slots` experts per row, with a list of `most` used ones; 0: no list."""
        chosen = torch.empty((rows, slots), dtype=torch.int32, device=device)
        weight = torch.empty((rows, slots), dtype=torch.float32, device=device)
        if most == 0:
            return Routed(chosen, weight)
        used, num_used = (torch.empty(size, dtype=torch.int32, device=device) for size in (most, 1))
        return Routed(chosen, weight, used, num_used)

    def reset_count(self) -> None:
        """Zero `count`, if no kernel will sort the rows. Otherwise the next launch would continue counting from it, and
        its ranks would be out of bounds."""
        if self.count is not None:
            with contextlib.suppress(RuntimeError):  # after a failed capture, which has counted nothing
                self.count.zero_()


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return the experts of each row [rows, experts_per_token] int64, unordered, and their weights, float32.

    logits: [rows, num_experts] float32.
    bias: [num_experts] float32 if the routing has one.

    Source: DeepSeek-V2 (arXiv 2405.04434, section 2.2), DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).
    """
    scores = torch.softmax(logits, -1) if routing.scoring == "softmax" else logits.sigmoid()
    preference = scores if bias is None else scores + bias
    if routing.groups_per_token < routing.num_groups:
        preference = _only_best_groups(preference, routing)
    chosen = preference.topk(routing.experts_per_token, -1, sorted=False).indices
    weight = scores.gather(1, chosen)
    if routing.normalise:
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)  # all sigmoids may be zero
    return chosen, weight * routing.scale


def _only_best_groups(preference: Tensor, routing: Routing) -> Tensor:
    """Set preference [rows, num_experts] to minus infinity outside each row's best groups."""
    groups = preference.view(preference.shape[0], routing.num_groups, -1)
    worth = groups.topk(routing.best_of_group, -1).values.sum(-1)
    best = worth.topk(routing.groups_per_token, -1, sorted=False).indices
    outside = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, False)
    return groups.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(1)
