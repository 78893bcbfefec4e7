"""Which experts a row goes to, and how much each counts. Shapes depend on no value, so that it can be captured."""

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

NO_EXPERT = -1  # in place of an expert: of padding rows, and where another rank has it
MAX_LISTED = 16  # rows, up to which the experts that any of them uses are listed
SCORINGS = ("softmax", "sigmoid")


@dataclass(frozen=True)
class Routing:
    """How experts are chosen by their scores.

    experts_per_token: chosen for a row.
    scoring: one of `SCORINGS`, over the router's logits in float32.
    num_groups: experts stand in groups of equal size, of which only the best groups_per_token are chosen from; a group
        is worth the sum of its best_of_group highest scores.
    has_bias: a bias on scores, which decides who is chosen and not how much they count (arXiv 2412.19437, 2.1.2).
    normalise: weights of a row are divided by their sum; then all are multiplied by `scale`.
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

    def check(self, source: str) -> None:
        """Raises ValueError, naming `source`, for what cannot be."""
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
    """Which rows of a pass are padding: those whose KV goes to the dummy page.

    slots: [rows] int64, where each row's KV is written. first: the smallest that is not of the dummy page.
    """

    slots: Tensor
    first: int


@dataclass(frozen=True)
class RouterLogits:
    """What decides where rows go.

    values: float32 [rows, num_experts], or [parts, rows, num_experts], to be added up in their order.
    bias: float32 [num_experts] if the routing has one.
    live: None if no row is padding, or whatever padding rows go through does not matter.
    """

    values: Tensor
    bias: Tensor | None
    routing: Routing
    live: TokenSlots | None = None

    def choose(self) -> tuple[Tensor, Tensor]:
        """As `route` gives them; of padding rows too."""
        return route(self.values if self.values.dim() == 2 else self.values.sum(0), self.bias, self.routing)


@dataclass(frozen=True)
class Routed:
    """Where rows go.

    chosen: [rows, slots] int32, experts of each row as this rank numbers them, the shared ones (numbered after the
        others) last; NO_EXPERT for padding rows, and where another rank has the expert.
    weight: [rows, slots] float32, 1 for shared experts, 0 for nobody.
    used: [most] int32, the experts that any row goes to, ascending, then NO_EXPERT. None where they are not listed.
    num_used: [1] int32, how many those are.
    rank: [rows, slots] int32, of each row among those of its expert, in no order that can be relied on; undefined for
        nobody. None where experts are listed.
    count: [experts] int32, rows that each has; to be zero again before the next launch. None as `rank`.
    """

    chosen: Tensor
    weight: Tensor
    used: Tensor | None = None
    num_used: Tensor | None = None
    rank: Tensor | None = None
    count: Tensor | None = None

    def forget(self) -> None:
        """Puts zeros into `count` where nobody will order the rows: ranks of the next launch, which go on from what is
        there, would be beyond the places that there are."""
        if self.count is not None:
            with contextlib.suppress(RuntimeError):  # of a capture that has failed, in which nothing was counted
                self.count.zero_()


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """The experts of each row [rows, experts_per_token] int64, in no order, and their weights, float32.

    logits: [rows, num_experts] float32. bias: [num_experts] float32 if the routing has one.
    Source: DeepSeek-V2 (arXiv 2405.04434, section 2.2), DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).
    """
    scores = torch.softmax(logits, -1) if routing.scoring == "softmax" else logits.sigmoid()
    preference = scores if bias is None else scores + bias
    if routing.groups_per_token < routing.num_groups:
        preference = _only_best_groups(preference, routing)
    chosen = preference.topk(routing.experts_per_token, -1, sorted=False).indices
    weight = scores.gather(1, chosen)
    if routing.normalise:
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all round to zero
    return chosen, weight * routing.scale


def _only_best_groups(preference: Tensor, routing: Routing) -> Tensor:
    """preference [rows, num_experts], minus infinity outside of each row's best groups."""
    groups = preference.view(preference.shape[0], routing.num_groups, -1)
    worth = groups.topk(routing.best_of_group, -1).values.sum(-1)
    best = worth.topk(routing.groups_per_token, -1, sorted=False).indices
    outside = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, False)
    return groups.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(1)
