"""The pre-norm residual block of all decoders. The model family (`aerie.workers.models`) supplies attention and MLP."""

from abc import ABC, abstractmethod
from functools import cached_property

import torch
from torch import Tensor, nn

from aerie.kernels.experts.norm_route import Norm
from aerie.kernels.experts.route import TokenSlots
from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows
from aerie.kernels.host_layer import HostLayer, HostProduct, PlacedLayer
from aerie.kernels.kv.batches import LayerKV
from aerie.kernels.rope.rope_store import Angles
from aerie.workers.distributed.tp_group import SOLO, TPGroup
from aerie.workers.layers.forward_context import ForwardContext
from aerie.workers.layers.norm import RMSNorm


class AttentionLayer(nn.Module, ABC):
    """Attention over the KV of one layer, or a recurrence over its state."""

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        """The FP8 format that `partial` accepts, beside the model's dtype; None if it accepts none."""
        return None

    @abstractmethod
    def partial(self, x: Tensor | Fp8Rows, angles: Angles, context: ForwardContext) -> Tensor:
        """Return this rank's part of the output, to be summed over the ranks (see `RowParallelLinear.partial`), and
        write the KV of all rows to the pool.

        x: [rows, input size] in the model's dtype, or in the format `fp8_inputs`.
        angles: RoPE angles of the rows.
        context: page tables, lengths and KV slots of the pass.
        returns: [n, hidden_size] for the n rows of `context.attending`, which is None for all rows.
        """

    def host_layer(self, gate_up: HostProduct, down: HostProduct, norm: Tensor, eps: float) -> HostLayer | None:
        """Return the layer with this attention, if one kernel of a CPU computes it; else None."""
        return None

    @abstractmethod
    def keep(self, x: Tensor | Fp8Rows, angles: Angles, context: ForwardContext) -> None:
        """Write the KV of all rows; compute no output."""


class FeedForward(nn.Module, ABC):
    """The part of a block that computes each row independently: an MLP or experts."""

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        """The FP8 format that `partial` accepts, beside the model's dtype; None if it accepts none."""
        return None

    @abstractmethod
    def partial(self, x: Tensor | Fp8Rows, live: TokenSlots | None = None) -> Tensor:
        """Return this rank's part of the output [rows, hidden_size], as `RowParallelLinear.partial` does.

        x: [rows, hidden_size] in the model's dtype, or in the format `fp8_inputs`.
        live: marks padding rows, whose output is unused.
        """

    def host_products(self) -> tuple[HostProduct, HostProduct] | None:
        """Return the products of a gated MLP with SiLU, if a CPU's kernels multiply both; else None."""
        return None

    def partial_of_sum(
        self, x: Tensor, residual: Tensor, norm: Norm, live: TokenSlots, group: TPGroup
    ) -> tuple[Tensor, Tensor] | None:
        """Return `partial` of norm(x + residual), and x + residual, by one fused kernel; None if there is none for this
        layer and batch.

        x, residual: [rows, hidden_size], unchanged; x is this rank's part of a sum.
        live: marks padding rows, whose output is unused.
        group: ranks over which x is to be summed first.
        """
        return None


class DecoderLayer(nn.Module):
    """h = x + r attention(norm(x)), then h + r mlp(norm(h)).

    residual_multiplier: r (Granite); 1 for others.
    before: class of the input norm; None: as `norm`.
    group: the ranks whose parts are summed.
    unsummed: the ranks whose parts of the layer's output the caller sums.
    tail: applied to the residual stream after the layer's output is added; None: nothing.
    """

    def __init__(
        self,
        hidden_size: int,
        rms_eps: float,
        attention: AttentionLayer,
        mlp: FeedForward,
        group: TPGroup,
        norm: type[RMSNorm] = RMSNorm,
        residual_multiplier: float = 1.0,
        before: type[RMSNorm] | None = None,
    ) -> None:
        super().__init__()
        self.group = self.unsummed = group
        self.residual_multiplier = residual_multiplier
        self.tail: LayerTail | None = None
        self._placed: PlacedLayer | None = None
        self.input_layernorm = (before or norm)(hidden_size, rms_eps)
        self.self_attn = attention
        self.post_attention_layernorm = norm(hidden_size, rms_eps)
        self.mlp = mlp

    def forward(
        self, normed: Tensor | Fp8Rows, residual: Tensor, angles: Angles, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Return this rank's part of the MLP's output and the residual stream before it: [n, hidden] each, for the n
        rows of `context.attending`. The caller sums the parts and adds them to the stream in the next norm.

        normed: [rows, hidden] the input norm's output, in the model's dtype or the attention's `fp8_inputs`.
        residual: [rows, hidden].
        """
        out = self._on_host(normed, residual, angles, context)
        if out is not None:
            return out, residual
        attended = self._multiplied(self.self_attn.partial(normed, angles, context))
        residual = context.attending_rows(residual)
        norm = self.post_attention_layernorm
        if norm.weight.numel():
            both = Norm(norm.weight, norm.eps)
            done = self.mlp.partial_of_sum(attended, residual, both, context.token_slots, self.group)
            if done is not None:
                return self._multiplied(done[0]), done[1]
        normed, residual = norm.add_for_product(attended, residual, self.mlp.fp8_inputs, self.group)
        return self._multiplied(self.mlp.partial(normed, context.token_slots)), residual

    def _on_host(
        self, normed: Tensor | Fp8Rows, residual: Tensor, angles: Angles, context: ForwardContext
    ) -> Tensor | None:
        """Compute the layer by one kernel of a CPU, and add attention to `residual`; None if there is none for it."""
        if self.group.size > 1 or not isinstance(normed, Tensor) or not normed.dtype == residual.dtype == torch.float32:
            return None
        batch = context.host_pass(angles)
        weights = None if batch is None else self.host_weights
        if batch is None or weights is None or (weights.window is not None and batch.rows > 1):
            return None
        kv = context.pool.layer(self.self_attn.layer)  # type: ignore[arg-type]
        if not isinstance(kv, LayerKV) or kv.k.dtype != torch.float32:
            return None
        if self._placed is None or self._placed.pages != kv.k.data_ptr():
            self._placed = weights.on(kv)
        return self._placed.run(batch, normed, residual)

    @cached_property
    def host_weights(self) -> HostLayer | None:
        """The weights, if one kernel of a CPU computes the whole layer; constant once they are finished, until
        `reloaded`."""
        mlp = self.mlp.host_products()
        norm = self.post_attention_layernorm
        is_plain = self.residual_multiplier == 1.0 and norm.weight.dtype == torch.float32 and norm.weight.numel() > 0
        return None if mlp is None or not is_plain else self.self_attn.host_layer(*mlp, norm.weight, norm.eps)

    def reloaded(self) -> None:
        """Forget where the weights were, because they have been loaded again."""
        self.__dict__.pop("host_weights", None)
        self._placed = None

    def _multiplied(self, branch: Tensor) -> Tensor:
        return branch if self.residual_multiplier == 1.0 else branch.mul_(self.residual_multiplier)


class LayerTail(nn.Module, ABC):
    """A change of the residual stream after a layer."""

    @abstractmethod
    def forward(self, stream: Tensor, layer_input: Tensor | None) -> Tensor:
        """Return the stream that enters the next layer; may write to `stream`.

        stream: [n, hidden_size], of the rows of `ForwardContext.attending`.
        layer_input: [n, size] this layer's output of the model's `LayerInputs`; None without.
        """


class LayerInputs(nn.Module, ABC):
    """Per-layer embeddings of tokens, which enter at the end of each layer (Gemma 4)."""

    @abstractmethod
    def forward(self, ids: Tensor, embedded: Tensor) -> Tensor:
        """Return [layers, rows, size] for token ids [rows] int64 and their embedding [rows, hidden_size], scaled."""


class SandwichLayer(DecoderLayer):
    """h = x + norm(attention(norm(x))), then h + norm(mlp(norm(h))), as in Gemma 2 and later.

    A norm after attention or MLP needs the sum over all ranks, so the layer returns its whole output.

    before: class of the norms before attention and MLP; None: as `norm`. `NoNorm` for OLMo 2.
    """

    def __init__(
        self,
        hidden_size: int,
        rms_eps: float,
        attention: AttentionLayer,
        mlp: FeedForward,
        group: TPGroup,
        norm: type[RMSNorm] = RMSNorm,
        before: type[RMSNorm] | None = None,
    ) -> None:
        super().__init__(hidden_size, rms_eps, attention, mlp, group, norm, before=before)
        self.unsummed = SOLO
        self.pre_feedforward_layernorm = (before or norm)(hidden_size, rms_eps)
        self.post_feedforward_layernorm = norm(hidden_size, rms_eps)

    def forward(
        self, normed: Tensor | Fp8Rows, residual: Tensor, angles: Angles, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        attended = self.group.all_reduce(self.self_attn.partial(normed, angles, context))
        residual = context.attending_rows(residual)
        added = self.post_attention_layernorm(attended)
        normed, residual = self.pre_feedforward_layernorm.add_for_product(added, residual, self.mlp.fp8_inputs)
        out = self._feed_forward(normed, residual, context.token_slots)
        return self.post_feedforward_layernorm(out), residual

    def _feed_forward(self, normed: Tensor | Fp8Rows, residual: Tensor, live: TokenSlots) -> Tensor:
        """Return the output, summed over the ranks, before the last norm. residual: the input of the norm that gave
        `normed`."""
        return self.group.all_reduce(self.mlp.partial(normed, live))
