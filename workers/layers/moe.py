"""Mixture of experts, and the gated MLP. A router chooses each row's experts; shared experts compute every row, and are
stored after the routed ones where an `ExpertsMethod` allows it. A rank has a slice of every expert (tensor parallelism)
or some whole experts (expert parallelism)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from aerie.kernels.experts.gated import SWIGLU, GatedActivation
from aerie.kernels.experts.norm_route import MAX_LOGITS, Norm, norm_route
from aerie.kernels.experts.route import RouterLogits, Routing, TokenSlots
from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.host_layer import HostProduct
from aerie.kernels.norm.norm import ACTIVATIONS, sigmoid_mul
from aerie.kernels.span import Span
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.decoder_layer import FeedForward
from aerie.workers.layers.experts_method import ExpertsMethod, ExpertsShape, UnquantizedExperts
from aerie.workers.layers.linear import GateUpParallelLinear, RowParallelLinear, rank_span
from aerie.workers.layers.linear_method import LinearShape
from aerie.workers.layers.routing import Router
from aerie.workers.layers.weighted import Unweighted, WeightedModule, WeightKey


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

    @property
    def is_sharded(self) -> bool:
        return not (self.shape.held.is_whole and self.shape.parts[0].rows.is_whole)

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


class GatedMLP(FeedForward):
    """(activation(x W_gate^T) * (x W_up^T)) W_down^T. activation: of `aerie.kernels.norm.norm.ACTIVATIONS`."""

    def __init__(self, hidden_size: int, intermediate_size: int, group: TPGroup, activation: str = "silu") -> None:
        super().__init__()
        self.activation = activation
        self.gate_up = GateUpParallelLinear(hidden_size, intermediate_size, group, "intermediate_size")
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, group, "intermediate_size")

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        return self.gate_up.method.fp8_inputs

    def host_products(self) -> tuple[HostProduct, HostProduct] | None:
        first, second = self.gate_up.host_product, self.down_proj.host_product
        return None if first is None or second is None or self.activation != "silu" else (first, second)

    def forward(self, x: Tensor | Fp8Rows) -> Tensor:
        return self.down_proj.group.all_reduce(self.partial(x))

    def partial(self, x: Tensor | Fp8Rows, live: TokenSlots | None = None) -> Tensor:
        if self.activation == "silu":
            return self.down_proj.gated_partial(x, self.gate_up)
        inner = self.gate_up.method.multiply(x, None)
        return self.down_proj.partial(ACTIVATIONS[self.activation](inner))


class MixtureOfExperts(FeedForward, Unweighted):
    """A router, the experts that it chooses, and shared experts, which compute every row.

    width: intermediate size of an expert.
    shared_width: intermediate size of all shared experts together; 0 without. They are one MLP, sharded along its
        width. `finish` joins it to the routed experts if possible. Its weight is 1, or the sigmoid of the router's last
        logit (`Routing.shared_gate`).
    joined: these shared experts alone, once they are joined, for passes with adapters of them; () without adapters.
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
        self.joined: tuple[GatedMLP, ...] = ()  # no submodule: weights that are loaded again would change it alone

    @property
    def _shared_alone(self) -> GatedMLP | None:
        """The shared experts, unless the pass computes them with the routed ones; None without."""
        adapted = (mlp for mlp in self.joined if mlp.gate_up.method.is_adapted)
        return next(adapted, self.shared_experts)

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        wanted = self.experts.method.fp8_inputs
        alone = self._shared_alone
        if wanted is None or alone is None:
            return wanted
        shared = alone.fp8_inputs  # experts accept any layout of scales
        if shared is None or shared.by_group != wanted.by_group:
            return None
        return Fp8Inputs(shared.by_group, shared.many, plain=True)

    def partial(self, x: Tensor | Fp8Rows, live: TokenSlots | None = None) -> Tensor:
        plain = x if isinstance(x, Tensor) else x.plain
        assert plain is not None, "the router needs rows in the model's dtype"
        router: RouterLogits = self.router(plain, live)
        alone = self._shared_alone
        if alone is None:
            # The kernel writes to the all-reduce's buffer, which saves a copy. Below, the sum is a new tensor anyway.
            out = self.group.all_reduce_buffer(plain.shape[0], plain.shape[1], plain.dtype)
            return self.experts.method.multiply(x, router, out)
        shared, routed = alone.partial(x), self.experts.method.multiply_routed(x, router)
        if not router.routing.shared_gate:
            return shared.add_(routed)
        gate = router.shared_gate().to(shared.dtype)
        return sigmoid_mul(shared.unsqueeze(1), gate.unsqueeze(1), routed.unsqueeze(1)).squeeze(1)

    def partial_of_sum(
        self, x: Tensor, residual: Tensor, norm: Norm, live: TokenSlots, group: TPGroup
    ) -> tuple[Tensor, Tensor] | None:
        method, workspace = self.experts.method, self.router.workspace
        is_alone = x.shape[0] == 1 and group.size == self.group.size == 1 and self._shared_alone is None
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
            self.shared_experts, self.joined = None, (shared,) if options.adapted else ()
