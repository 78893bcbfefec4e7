"""Mixture of experts: a router chooses each row's experts; shared experts compute every row."""

from torch import Tensor

from aerie.kernels.experts.gated import SWIGLU, GatedActivation
from aerie.kernels.experts.norm_route import MAX_LOGITS, Norm, norm_route
from aerie.kernels.experts.route import RouterLogits, Routing, TokenSlots
from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.norm.activation import sigmoid_mul
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.decoder_layer import FeedForward
from aerie.workers.layers.experts import Experts
from aerie.workers.layers.mlp import GatedMLP
from aerie.workers.layers.routing import Router
from aerie.workers.layers.weighted import Unweighted


class MixtureOfExperts(FeedForward, Unweighted):
    """width: intermediate size of an expert.
    shared_width: intermediate size of all shared experts together; 0 without. They are one MLP, sharded along its
        width. `finish` joins it to the routed experts if possible. Its weight is 1, or the sigmoid of the router's last
        logit (`Routing.shared_gate`).
    whole_experts: expert parallelism: each rank has some whole experts instead of a slice of each. Every rank has all
        rows and computes those that chose its experts; the parts are summed.
    activation, biased_experts: properties of the routed experts.
    """

    def __init__(
        self,
        hidden_size: int,
        width: int,
        routing: Routing,
        group: TPGroup,
        shared_width: int = 0,
        whole_experts: bool = False,
        activation: GatedActivation = SWIGLU,
        biased_experts: bool = False,
    ) -> None:
        super().__init__()
        self.group = group
        self.router = Router(hidden_size, routing)
        whole = whole_experts and group.size > 1
        num_shared = 0 if whole or shared_width % width else shared_width // width
        self.experts = Experts(
            routing.num_experts,
            hidden_size,
            width,
            group,
            routing.experts_per_token,
            num_shared,
            whole,
            activation,
            biased_experts,
        )
        self.shared_experts = GatedMLP(hidden_size, shared_width, group) if shared_width else None

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        wanted = self.experts.method.fp8_inputs
        if wanted is None or self.shared_experts is None:
            return wanted
        shared = self.shared_experts.fp8_inputs  # experts accept any layout of scales
        if shared is None or shared.by_group != wanted.by_group:
            return None
        return Fp8Inputs(shared.by_group, shared.many, plain=True)

    def partial(self, x: Tensor | Fp8Rows, live: TokenSlots | None = None) -> Tensor:
        plain = x if isinstance(x, Tensor) else x.plain
        assert plain is not None, "the router needs rows in the model's dtype"
        router: RouterLogits = self.router(plain, live)
        if self.shared_experts is None:
            out = self.group.all_reduce_buffer(plain.shape[0], plain.shape[1], plain.dtype)
            return self.experts.method.multiply(x, router, out)
        shared, routed = self.shared_experts.partial(x), self.experts.method.multiply(x, router)
        if not router.routing.shared_gate:
            return shared.add_(routed)
        gate = router.shared_gate().to(shared.dtype)
        return sigmoid_mul(shared.unsqueeze(1), gate.unsqueeze(1), routed.unsqueeze(1)).squeeze(1)

    def partial_of_sum(
        self, x: Tensor, residual: Tensor, norm: Norm, live: TokenSlots, group: TPGroup
    ) -> tuple[Tensor, Tensor] | None:
        method, workspace = self.experts.method, self.router.workspace
        is_alone = x.shape[0] == 1 and group.size == self.group.size == 1 and self.shared_experts is None
        is_small = self.router.routing.num_logits <= MAX_LOGITS and method.fp8_inputs is None
        if not (is_alone and is_small and method.is_fused) or workspace is None:
            return None
        weights = self.router.weights(self.experts.shape.num_shared)
        done = norm_route(x, residual, norm, weights, live, workspace)
        unused = workspace.part[: weights.routing.num_logits].view(1, -1)  # logits; the experts are chosen already
        router = RouterLogits(unused, weights.correction, weights.routing, live, routed=done.routed)
        return method.multiply(done.normed, router), done.stream

    def finish(self, options: GEMMOptions) -> None:
        shared = self.shared_experts
        if shared is not None and self.experts.method.join(shared.gate_up.method, shared.down_proj.method, options):
            self.shared_experts = None
