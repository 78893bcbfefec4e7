"""Cases of the norm, router and routing of one row."""

from typing import Any

import torch
from torch import Tensor

from aerie.kernels.experts.norm_route import Norm, NormedAndRouted, RouterWeights, cells_of, norm_route
from aerie.kernels.experts.route import Routing, TokenSlots
from aerie.kernels.gemm.workspace import Workspace
from tests.kernels.ops.case import Case

# size, routing, shared experts, bias of the logits
KINDS: dict[str, tuple[int, Routing, int, bool]] = {
    "gpt_oss": (320, Routing(32, 4, normalise=True, biased_logits=True), 0, True),
    "qwen": (256, Routing(70, 8, normalise=True, shared_gate=True), 1, False),
    "glm": (384, Routing(12, 3, "sigmoid", 4, 2, 2, has_bias=True, normalise=True, scale=2.5), 1, False),
    "gemma": (128, Routing(8, 2, normalise=True, scales_experts=True), 0, False),
}


def arguments(kind: str, is_live: bool, device: torch.device) -> tuple[Any, ...]:
    size, routing, num_shared, biased = KINDS[kind]
    generator = torch.Generator().manual_seed(size)

    def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    experts, wide = routing.num_experts, torch.float32
    router = RouterWeights(
        drawn(routing.num_logits, size),
        drawn(routing.num_logits) if biased else None,
        drawn(experts, dtype=wide) if routing.has_bias else None,
        drawn(experts, dtype=wide).abs() + 0.5 if routing.scales_experts else None,
        routing,
        num_shared,
    )
    norm = Norm(drawn(size, dtype=wide if kind == "qwen" else torch.bfloat16), 1e-5)
    live = TokenSlots(torch.tensor([16 if is_live else 15], device=device), 16)
    workspace = Workspace.allocate(cells_of(routing.num_logits), 1, device)
    return drawn(1, size) * 3, drawn(1, size) * 5, norm, router, live, workspace


def _seen(given: tuple[Any, ...], found: NormedAndRouted) -> list[Tensor]:
    """The weights by expert, since chosen experts have no order; tickets, which must be zero again."""
    routed, router, workspace = found.routed, given[3], given[5]
    assert routed.used is not None and routed.num_used is not None
    weights = torch.zeros(router.routing.num_experts + router.num_shared + 1, device=routed.weight.device)
    weights[routed.chosen[0].long()] = routed.weight[0]
    return [found.normed.bfloat16(), found.stream, weights.bfloat16(), routed.used, routed.num_used, workspace.tickets]


CASES = tuple(
    Case(
        norm_route,
        f"{kind}-{'live' if is_live else 'padding'}",
        lambda device, kind=kind, is_live=is_live: arguments(kind, is_live, device),
        seen=_seen,
    )
    for kind in KINDS
    for is_live in (True, False)
)
