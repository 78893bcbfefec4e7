"""A mixture of experts: each row through the experts that a router chooses, and through shared experts if there are."""

from torch import Tensor

from workers.distributed.tp_group import TPGroup
from workers.layers.decoder_layer import FeedForward
from workers.layers.experts import Experts
from workers.layers.mlp import GatedMLP
from workers.layers.routing import Router, Routing


class MixtureOfExperts(FeedForward):
    """width: the intermediate size of an expert. shared_width: of all shared experts together, 0 without."""

    def __init__(self, hidden_size: int, width: int, routing: Routing, group: TPGroup, shared_width: int = 0) -> None:
        super().__init__()
        self.router = Router(hidden_size, routing)
        self.experts = Experts(routing.num_experts, hidden_size, width, group)
        self.shared_experts = GatedMLP(hidden_size, shared_width, group) if shared_width else None

    def partial(self, x: Tensor) -> Tensor:
        routed: Tensor = self.experts(x, *self.router(x))
        if self.shared_experts is None:
            return routed
        return self.shared_experts.partial(x).add_(routed)
