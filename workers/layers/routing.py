"""The router of a mixture of experts: scores every expert for every row."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from aerie.kernels.experts.norm_route import RouterWeights, cells_of
from aerie.kernels.experts.route import RouterLogits, Routing, TokenSlots
from aerie.kernels.experts.router_gemm import router_gemm
from aerie.kernels.gemm.workspace import GEMMOptions, Workspace
from aerie.kernels.span import Span
from aerie.workers.layers.weighted import Vector, WeightedModule, WeightKey, check_shape

# Checkpoint names of the parts of the router's weight.
GATE, SHARED_GATE = "gate", "shared_expert_gate"


class Router(WeightedModule):
    """The router, replicated on every rank, so that all ranks choose the same experts. Never quantised; computes in
    float32.

    weight: [num_logits, hidden_size]: the experts' rows, then the shared gate's row if there is one, then zeros.
    bias: [num_logits] added to the logits; None without.
    e_score_correction_bias: [num_experts] float32; None without.
    scales: a factor on each expert's weights; None without.
    recorded: returns where each token's chosen experts are stored (`ExpertIds`); None: nowhere.
    """

    recorded: Callable[[], Tensor] | None = None

    def __init__(self, hidden_size: int, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        self._workspace: Workspace | None = None
        self._deterministic = False
        self.weight = nn.Parameter(torch.empty(routing.num_logits, hidden_size), requires_grad=False)
        assert not (routing.shared_gate and routing.biased_logits), "no family has both"
        bias = torch.empty(routing.num_logits)
        self.bias = nn.Parameter(bias, requires_grad=False) if routing.biased_logits else None
        correction = torch.empty(routing.num_experts, dtype=torch.float32)
        self.e_score_correction_bias = nn.Parameter(correction, requires_grad=False) if routing.has_bias else None
        self.scales = (
            Vector("per_expert_scale", Span.whole(routing.num_experts), torch.float32)
            if routing.scales_experts
            else None
        )

    def scored(self, x: Tensor, live: TokenSlots | None = None) -> RouterLogits:
        """Return the router logits of x [rows, hidden_size]. live: KV slots of the rows."""
        logits = router_gemm(x, self.weight, self.bias, self._workspace, self._deterministic)
        scales = None if self.scales is None else self.scales.weight
        return RouterLogits(logits, self.e_score_correction_bias, self.routing, live, scales)

    def forward(self, x: Tensor, live: TokenSlots | None = None) -> RouterLogits:
        """Return `scored`, and store the chosen experts with `recorded`."""
        router = self.scored(x, live)
        if self.recorded is not None:
            assert live is not None, "passes of a target mark their rows"
            ids = self.recorded()
            ids.view(-1, ids.shape[-1]).index_copy_(0, live.slots, router.choose()[0].to(ids.dtype))
        return router

    def weights(self, num_shared: int) -> RouterWeights:
        """Return the weights as kernels take them. num_shared: shared experts joined to the routed ones."""
        scales = None if self.scales is None else self.scales.weight
        return RouterWeights(self.weight, self.bias, self.e_score_correction_bias, scales, self.routing, num_shared)

    @property
    def workspace(self) -> Workspace | None:
        """Scratch for the router's GEMM fused with the norm before it. None without kernels for the device, in
        deterministic engines, where a row's sums must not depend on the number of rows, and where choices are
        recorded, because the fused kernel numbers experts differently."""
        return None if self._deterministic or self.recorded is not None else self._workspace

    def workspace_size(self) -> tuple[int, int]:
        return cells_of(self.routing.num_logits), 1

    def finish(self, options: GEMMOptions) -> None:
        if self.weight.shape[1] % 64 == 0:
            self._workspace, self._deterministic = options.workspace, options.deterministic

    def weight_keys(self) -> Iterator[WeightKey]:
        if self.routing.shared_gate:
            yield WeightKey("weight", GATE)
            yield WeightKey("weight", SHARED_GATE)
        else:
            yield WeightKey("weight")
        if self.bias is not None:
            yield WeightKey("bias")
        if self.e_score_correction_bias is not None:
            yield WeightKey("e_score_correction_bias")

    def load(self, key: WeightKey, full: Tensor) -> None:
        parameter = {"weight": self.weight, "bias": self.bias}.get(key.kind, self.e_score_correction_bias)
        assert parameter is not None, "key not in `weight_keys`"
        experts, rows = self.routing.num_experts, parameter.data
        if key.part:
            rows[experts + 1 :].zero_()
            rows = rows[experts : experts + 1] if key.part == SHARED_GATE else rows[:experts]
        check_shape(full, rows.shape)
        rows.copy_(full)

    def fill_dummy(self, generator: torch.Generator) -> None:
        self.weight.data.normal_(0.0, 0.02, generator=generator)
        for bias in (self.bias, self.e_score_correction_bias):
            if bias is not None:
                bias.data.zero_()
