"""The Llama block and its parts: attention over a `ForwardContext`, gated MLP. Qwen2 and Qwen3 differ by two flags."""

from torch import Tensor, nn

from workers.distributed.tp_group import TPGroup
from workers.layers.linear import ColumnLinear, GatedLinear, RowLinear, kv_head_span, rank_span
from workers.layers.norm import RMSNorm
from workers.layers.rotary import Angles
from workers.models.config import ModelConfig
from workers.runner.forward_context import ForwardContext


class Attention(nn.Module):
    """Grouped-query attention. input_size: hidden_size, or twice that in an EAGLE-3 head."""

    def __init__(self, config: ModelConfig, layer: int, group: TPGroup, input_size: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        q_first, q_end = rank_span(config.num_heads, group, "num_attention_heads")
        kv_first, kv_end = kv_head_span(config.num_kv_heads, group)
        self.num_heads, self.num_kv_heads = q_end - q_first, kv_end - kv_first
        self.scale = config.head_dim**-0.5
        q_rows = (q_first * self.head_dim, q_end * self.head_dim)
        kv_rows = (kv_first * self.head_dim, kv_end * self.head_dim)
        parts = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        self.qkv = ColumnLinear(input_size, parts, config.qkv_bias)
        heads_size = config.num_heads * self.head_dim
        self.o_proj = RowLinear(heads_size, config.hidden_size, group, "num_attention_heads", config.o_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_eps) if config.qk_norm else None

    def partial(self, x: Tensor, angles: Angles, context: ForwardContext) -> Tensor:
        """This rank's part of the output, as `RowLinear.partial` gives it, of the rows that attend."""
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        qk, v = heads[:, : -self.num_kv_heads], heads[:, -self.num_kv_heads :]
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = context.attend(self.layer, q, (k, v), angles, self.scale)
        return self.o_proj.partial(out.flatten(1))


class MLP(nn.Module):
    """silu(x W_gate) * (x W_up), then W_down."""

    def __init__(self, config: ModelConfig, group: TPGroup) -> None:
        super().__init__()
        span = rank_span(config.intermediate_size, group, "intermediate_size")
        self.gate_up = GatedLinear(config.hidden_size, {"gate_proj": span, "up_proj": span}, bias=False)
        self.down_proj = RowLinear(config.intermediate_size, config.hidden_size, group, "intermediate_size")

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj.group.all_reduce(self.partial(x))

    def partial(self, x: Tensor) -> Tensor:
        """This rank's part of the output, as `RowLinear.partial` gives it."""
        return self.down_proj.partial(self.gate_up(x))


class DecoderLayer(nn.Module):
    """Pre-norm residual block: x + attention(norm(x)), then + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, group: TPGroup) -> None:
        super().__init__()
        self.group = group
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_eps)
        self.self_attn = Attention(config, layer, group, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_eps)
        self.mlp = MLP(config, group)

    def forward(
        self, normed: Tensor, residual: Tensor, angles: Angles, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """From the residual stream [rows, hidden] and its input norm: this rank's part of what the MLP adds to the
        stream, and the stream before that, both of the rows that attend. The caller sums and adds, together with the
        next norm."""
        attended = self.self_attn.partial(normed, angles, context)
        residual = context.attending_rows(residual)
        normed, residual = self.post_attention_layernorm.add(attended, residual, self.group)
        return self.mlp.partial(normed), residual
