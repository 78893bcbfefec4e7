"""Fused modules in place of those of transformers' towers. `aerie.workers.vision.fusing` puts them there.

Eagerly, RMSNorm takes six kernels and the rotation of queries and keys fourteen, in float32. Computed values are those
of transformers' modules, but for the order of float32 sums.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aerie.kernels.norm import norm
from aerie.kernels.rope.rotate_heads import rotate_heads

_ALIGNED = 8  # 16-bit values whose rows start at multiples of 16 bytes, as the fast products of cuBLAS need
_TILE = 64  # columns of a tile of these products


class RMSNorm(nn.Module):
    def __init__(self, module: Any) -> None:
        """module: transformers' norm."""
        super().__init__()
        self.weight = module.weight
        self.eps = module.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return norm.rms_norm(x, self.weight, self.eps)

    def after_addition(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add x to `residual` in place, and return the norm of the sum."""
        return norm.add_rms_norm(x, residual, self.weight, self.eps)


class GatedMLP(nn.Module):
    """One product for gate and up projections. A width that is not aligned is padded with zeros, which add nothing."""

    def __init__(self, module: Any, activation: Callable[[Tensor], Tensor]) -> None:
        """module: transformers' MLP. activation: one of `norm.ACTIVATIONS`."""
        super().__init__()
        self._activation = activation
        width = module.gate_proj.out_features
        more = 0 if width % _ALIGNED == 0 else -width % _TILE
        first, second = module.gate_proj, module.up_proj
        self.gate_up = _linear(
            torch.cat([F.pad(linear.weight, (0, 0, 0, more)) for linear in (first, second)]),
            None if first.bias is None else torch.cat([F.pad(linear.bias, (0, more)) for linear in (first, second)]),
        )
        self.down_proj = _linear(F.pad(module.down_proj.weight, (0, more)), module.down_proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self._activation(self.gate_up(x)))
        return out


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear


class SpanAttention(nn.Module):
    """Attention within spans of rows. Queries and keys are rotated in place, within the product that contains them."""

    def __init__(self, module: Any, in_one_launch: bool) -> None:
        """module: transformers' attention. in_one_launch: attend in one launch, which needs a GPU and 16 bits; else in
        one for each span, after a wait for the bounds if they are on a device."""
        super().__init__()
        self.qkv, self.proj = module.qkv, module.proj
        self.num_heads = module.num_heads
        self.in_one_launch = in_one_launch

    def forward(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        max_seqlen: int | None = None,
        **_: object,
    ) -> Tensor:
        """Arguments as of transformers' attention.

        hidden_states: [rows, size].
        cu_seqlens: int32 [spans + 1], the spans' bounds.
        position_embeddings: cosine and sine of the angles, each [rows, head_dim] with equal halves.
        max_seqlen: rows of the longest span.
        """
        rows, heads = hidden_states.shape[0], self.num_heads
        qkv = self.qkv(hidden_states).view(rows, 3 * heads, -1)
        half = qkv.shape[2] // 2
        cos, sin = (angles.float()[:, :half] for angles in position_embeddings)
        rotate_heads(qkv[:, : 2 * heads], cos, sin)
        q, k, v = qkv.view(rows, 3, heads, -1).unbind(1)
        if self.in_one_launch:
            assert max_seqlen is not None
            out = attend_spans(q, k, v, cu_seqlens, max_seqlen)
        else:
            out = _attend_each_span(q, k, v, cu_seqlens.tolist())
        attended: Tensor = self.proj(out.reshape(rows, -1))
        return attended


def attend_spans(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
    """Attend within spans in one launch, on a GPU.

    q, k, v: [rows, heads, head_dim], 16 bits, last stride 1.
    bounds: int32 [spans + 1].
    longest: rows of the longest span.
    Returns q's shape and dtype.
    """
    from torch.nn.attention.varlen import varlen_attn  # imports Triton (torch 2.13), which a CPU does without

    out = varlen_attn(q, k, v, bounds, bounds, longest, longest)
    assert isinstance(out, Tensor)
    return out


def _attend_each_span(q: Tensor, k: Tensor, v: Tensor, bounds: list[int]) -> Tensor:
    """As `attend_spans`, with a launch for each span, in any dtype on any device."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    parts = []
    for span in map(slice, bounds[:-1], bounds[1:]):
        parts.append(F.scaled_dot_product_attention(q[:, :, span], k[:, :, span], v[:, :, span]))
    return torch.cat(parts, dim=2)[0].transpose(0, 1)


class Block(nn.Module):
    """A block of RMSNorms, whose first addition is part of the second norm. Writes to its input."""

    def __init__(self, module: Any) -> None:
        """module: transformers' block, with fused parts."""
        super().__init__()
        self.norm1, self.norm2, self.attn, self.mlp = module.norm1, module.norm2, module.attn, module.mlp

    def forward(self, hidden_states: Tensor, **layout: Any) -> Tensor:
        attended = self.attn(self.norm1(hidden_states), **layout)
        return hidden_states.add_(self.mlp(self.norm2.after_addition(attended, hidden_states)))
