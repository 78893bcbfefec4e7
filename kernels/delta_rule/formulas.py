"""The gated delta rule in torch, for the references of this folder. All computation is in the state's dtype.

Sources: Gated Delta Networks, arXiv 2412.06464; UT transform, arXiv 2406.06484, section 3.2; names and order of
rounding: transformers' Qwen3-Next.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from aerie.kernels.delta_rule.tables import DeltaHeads, DeltaWeights

NORM_EPS = 1e-6  # epsilon of the l2 norms of q and k


def convolved(taps: Tensor, weights: DeltaWeights, full: torch.dtype) -> Tensor:
    """Return [..., C]: silu of the convolution, rounded to the rows' dtype.

    taps  [..., 4, C], each token's channels after those of the three tokens before it
    """
    out = (taps.to(full) * weights.conv.to(full)).sum(-2)
    return F.silu(out).to(taps.dtype)


def gates(b: Tensor, a: Tensor, weights: DeltaWeights, full: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return g [..., Hv], the logarithm of the decay, and beta [..., Hv], the learning rate."""
    g = -weights.a_log.to(full).exp() * F.softplus(a.to(full) + weights.dt_bias.to(full))
    return g, b.to(full).sigmoid()


def heads_of(channels: Tensor, heads: DeltaHeads, full: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Split convolved channels [..., C] into q and k [..., Hv, dk], normalised, q also scaled, and v [..., Hv, dv]."""
    keys = heads.key_heads * heads.key_dim
    q, k, v = torch.split(channels.to(full), [keys, keys, heads.value_heads * heads.value_dim], -1)
    q, k = (_normed(torch.unflatten(each, -1, (heads.key_heads, heads.key_dim))) for each in (q, k))
    q, k = (each.repeat_interleave(heads.group, -2) for each in (q * heads.key_dim**-0.5, k))
    return q, k, torch.unflatten(v, -1, (heads.value_heads, heads.value_dim))


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def advanced(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Return the state [..., dk, dv] after one token, by the recurrence. k: [..., dk]. v: [..., dv]. g, beta: [...]."""
    state = state * g.exp()[..., None, None]
    delta = beta.unsqueeze(-1) * (v - (state * k.unsqueeze(-1)).sum(-2))
    return state + k.unsqueeze(-1) * delta.unsqueeze(-2)


def block(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, seen: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute n rows after `state`. Each row sees itself and its ancestors.

    state    [..., dk, dv]
    q, k     [..., n, dk]
    v        [..., n, dv]
    g, beta  [..., n]
    seen     [..., n, n] bool, row i sees row j <= i: a tree's ancestors, or a triangle for a sequence
    ->       outputs [..., n, dv]; additions of the rows to the state [..., n, dv]; log decay since `state` [..., n]
    """
    decay = (seen.to(g.dtype) @ g.unsqueeze(-1)).squeeze(-1)
    # At most 0 if rows see all ancestors of their ancestors. Padding rows may not; the clamp keeps them finite.
    since = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).clamp(max=0.0)
    between = since.masked_fill(~seen, -torch.inf).exp()
    system = (beta.unsqueeze(-1) * (k @ k.mT) * between).tril(-1)
    wanted = beta.unsqueeze(-1) * (v - decay.exp().unsqueeze(-1) * (k @ state))
    added = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    return decay.exp().unsqueeze(-1) * (q @ state) + ((q @ k.mT) * between) @ added, added, decay


def gated_norm(o: Tensor, z: Tensor, weights: DeltaWeights) -> Tensor:
    """Return norm(o) * weight * gate(z) in z's dtype, rounded once. o: [..., Hv, dv]. z and result: [..., Hv * dv]."""
    z_of_heads = z.to(o.dtype).reshape(o.shape)
    gate = z_of_heads.sigmoid() if weights.sigmoid else F.silu(z_of_heads)
    normed = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + weights.eps)
    return (normed * weights.norm.to(o.dtype) * gate).flatten(-2).to(z.dtype)
