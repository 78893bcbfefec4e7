"""Routed experts over whole sequences, with gradients, for layers of every family. Tests compare them with the experts
that the engine serves."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.ops.experts.route import Routing, route

# Up to this many experts, every row goes through all of them: a few wide products without a device sync, which a CUDA
# graph can capture.
MAX_DENSE_EXPERTS = 64
_EXPERTS = ".mlp.experts."


class Router(nn.Module):
    """Chooses experts in float32."""

    e_score_correction_bias: Tensor

    def __init__(self, hidden: int, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        self.weight = nn.Parameter(torch.empty(routing.num_experts, hidden))
        if routing.has_bias:
            self.register_buffer("e_score_correction_bias", torch.zeros(routing.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen experts [N, k] int64 and their weights [N, k] float32 for rows [N, H]."""
        bias = self.e_score_correction_bias if self.routing.has_bias else None
        with torch.autocast(x.device.type, enabled=False):
            return route(functional.linear(x.float(), self.weight.float()), bias, self.routing)


class Experts(nn.Module):
    """gate_up: [experts, 2 width, H], the gate projection's rows first. down: [experts, H, width]."""

    def __init__(self, hidden: int, width: int, num_experts: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * width, hidden))
        self.down = nn.Parameter(torch.empty(num_experts, hidden, width))

    def forward(self, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        """`x` [N, H], `chosen` and `weight` [N, k] -> [N, H]."""
        return (self._all if len(self.down) <= MAX_DENSE_EXPERTS else self._chosen)(x, chosen, weight)

    def _all(self, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        """Run all experts as one wide gated MLP, in which experts that were not chosen have weight 0."""
        share = torch.zeros(len(x), len(self.down), dtype=weight.dtype, device=x.device).scatter(1, chosen, weight)
        both = functional.linear(x, self.gate_up.flatten(0, 1))
        gate, up = both.view(len(x), len(self.down), 2, -1).unbind(2)
        inner = functional.silu(gate) * up * share.to(up.dtype)[..., None]
        return functional.linear(inner.flatten(1), self.down.transpose(0, 1).flatten(1))

    def _chosen(self, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        """Run expert by expert. Waits for the device, so a CUDA graph cannot capture it."""
        out = x.new_zeros(x.shape)
        for expert in range(len(self.down)):
            row, rank = torch.where(chosen == expert)
            gate, up = functional.linear(x[row], self.gate_up[expert]).chunk(2, dim=-1)
            part = functional.linear(functional.silu(gate) * up, self.down[expert])
            out = out.index_add(0, row, (part * weight[row, rank, None]).to(out.dtype))
        return out


def named_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of layers by their published names: one matrix per expert, a view of the stacked ones."""
    found = {}
    for path, tensor in tensors.items():
        layer, experts, part = path.partition(_EXPERTS)
        if not experts:
            found[path] = tensor
            continue
        parts = {"down_proj": tensor}
        if part == "gate_up":
            parts = dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True))
        for name, stacked in parts.items():
            found |= {f"{layer}{_EXPERTS}{i}.{name}.weight": matrix for i, matrix in enumerate(stacked)}
    return found
