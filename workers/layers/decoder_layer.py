"""The pre-norm residual block that all our decoders are made of. Its family (`workers.models`) gives it its attention
and its MLP; neither is known here."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from workers.distributed.tp_group import TPGroup
from workers.layers.forward_context import ForwardContext
from workers.layers.norm import RMSNorm
from workers.ops.experts.route import TokenSlots
from workers.ops.fp8.rows import Fp8Inputs, Fp8Rows
from workers.ops.rotary import Angles


class AttentionLayer(nn.Module, ABC):
    """Rows that look at each other, through the KV of one layer."""

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        """In which form `partial` takes rows beside the model's type, if in any."""
        return None

    @abstractmethod
    def partial(self, x: Tensor | Fp8Rows, angles: Angles, context: ForwardContext) -> Tensor:
        """This rank's part of the output [n, hidden_size], as `RowParallelLinear.partial` gives it, of the rows that
        attend; x: [rows, input size]. Writes all rows' KV into the context's pool."""

    @abstractmethod
    def keep(self, x: Tensor | Fp8Rows, angles: Angles, context: ForwardContext) -> None:
        """`partial` of which no output is wanted: writes the rows' KV and nothing else."""


class FeedForward(nn.Module, ABC):
    """What a block does with each row by itself: an MLP, or experts."""

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        """In which form `partial` takes rows beside the model's type, if in any."""
        return None

    @abstractmethod
    def partial(self, x: Tensor | Fp8Rows, live: TokenSlots | None = None) -> Tensor:
        """This rank's part of the output [rows, hidden_size], as `RowParallelLinear.partial` gives it. x: rows in the
        model's type, or as `fp8_inputs` says. live: which rows are padding, whose output nobody reads."""


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then + mlp(norm(x)); group: the ranks whose parts are summed."""

    def __init__(
        self, hidden_size: int, rms_eps: float, attention: AttentionLayer, mlp: FeedForward, group: TPGroup
    ) -> None:
        super().__init__()
        self.group = group
        self.input_layernorm = RMSNorm(hidden_size, rms_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(hidden_size, rms_eps)
        self.mlp = mlp

    def forward(
        self, normed: Tensor | Fp8Rows, residual: Tensor, angles: Angles, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """From the residual stream [rows, hidden] and its input norm, in the model's type or of the attention's
        `fp8_inputs`: this rank's part of what the MLP adds to the stream, and the stream before that, both of the rows
        that attend. The caller sums and adds, together with the next norm."""
        attended = self.self_attn.partial(normed, angles, context)
        residual = context.attending_rows(residual)
        norm = self.post_attention_layernorm
        normed, residual = norm.add_for_product(attended, residual, self.mlp.fp8_inputs, self.group)
        return self.mlp.partial(normed, context.token_slots), residual
