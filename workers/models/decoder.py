"""`TargetModel`, the interface of targets for the runner and drafts, and `Decoder`, the base class of all families:
embedding, layers, norm and vocabulary head, tensor-parallel."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aerie.kernels.fp8.rows import Fp8Inputs
from aerie.workers.distributed.tp_group import SOLO, TPGroup
from aerie.workers.layers.decoder_layer import DecoderLayer, LayerInputs, LayerTail
from aerie.workers.layers.forward_context import ForwardContext
from aerie.workers.layers.norm import RMSNorm
from aerie.workers.layers.rotary import RotaryTable
from aerie.workers.layers.vocab import LMHead, VocabEmbedding
from aerie.workers.models.config import ModelConfig


@dataclass(frozen=True)
class DecoderOutput:
    """Output of a pass.

    hidden: [n, hidden_size] after the final norm, for the n rows of the last layer's `ForwardContext.attending`.
    captured: [rows, len(capture) * hidden_size], the concatenated residual streams at the inputs of the layers in
        `capture`; None if `capture` is empty. In `capture`, the number of layers means the output of the last layer,
        before the final norm.
    """

    hidden: Tensor
    captured: Tensor | None


class TargetModel(nn.Module, ABC):
    """Interface of a target for the runner and for drafts, tensor-parallel over `group`.

    capture: layers whose input `forward` returns besides the hidden states.
    embed_tokens: token embedding; drafts may share it.
    lm_head: [n, hidden_size] -> logits of this rank's vocabulary shard (`shard`); drafts may share it.
    """

    config: ModelConfig
    group: TPGroup
    capture: tuple[int, ...]
    embed_tokens: VocabEmbedding
    lm_head: LMHead

    @abstractmethod
    def forward(self, ids: Tensor, context: ForwardContext) -> DecoderOutput:
        """Return the hidden states of rows ids [rows] int64, and write their KV to the context's pool."""


def in_default_dtype(value: float) -> float:
    """Round to torch's default dtype, as transformers rounds some factors. It is the model's dtype while the model is
    built."""
    return float(torch.tensor(value, device="cpu").item())


class Decoder(TargetModel):
    """See `TargetModel`.

    rotary: table of RoPE angles, for all layers or one per layer.
    capture: if it has the output of the last layer, every row must attend there.
    norm: class of the final norm.
    embedding_scale: factor on the target's embedding; drafts use the embedding without it.
    logit_cap, logit_divisor: see `LMHead`.
    layer_inputs: inputs of the layers' tails.
    """

    def __init__(
        self,
        config: ModelConfig,
        group: TPGroup,
        rotary: RotaryTable | Sequence[RotaryTable],
        layers: Iterable[DecoderLayer],
        capture: tuple[int, ...],
        norm: type[RMSNorm] = RMSNorm,
        embedding_scale: float | None = None,
        logit_cap: float | None = None,
        logit_divisor: float = 1.0,
        layer_inputs: LayerInputs | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.group = group
        self.capture = capture
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, group)
        self.embedding_scale = embedding_scale
        self.layers = nn.ModuleList(layers)
        self.rotary = [rotary] * len(self.layers) if isinstance(rotary, RotaryTable) else list(rotary)
        self.norm = norm(config.hidden_size, config.rms_eps)
        tied = self.embed_tokens if config.tie_embeddings else None
        self.layer_inputs = layer_inputs
        self.lm_head = LMHead(
            config.vocab_size, config.hidden_size, group, tied, soft_cap=logit_cap, divisor=logit_divisor
        )

    def forward(self, ids: Tensor, context: ForwardContext) -> DecoderOutput:
        """Return the hidden states of rows ids [rows] int64, and write their KV to the context's pool."""
        residual, positions = self.embed_tokens(ids), context.positions
        if self.embedding_scale is not None:
            residual = residual * self.embedding_scale
        residual = context.embedded(residual)
        inputs = None if self.layer_inputs is None else self.layer_inputs(ids, residual)
        captured = residual.new_empty((ids.shape[0], len(self.capture), self.config.hidden_size))
        added: Tensor | None = None
        unsummed = SOLO
        angles = {table: table.at(positions) for table in set(self.rotary)}
        for i, layer in enumerate(self.layers):
            norm: RMSNorm = layer.input_layernorm  # type: ignore[assignment]
            wanted: Fp8Inputs | None = layer.self_attn.fp8_inputs  # type: ignore[union-attr, assignment]
            if added is None:
                normed = norm.for_product(residual, wanted)
            else:
                normed, residual = norm.add_for_product(added, residual, wanted, unsummed)
            if i in self.capture:  # copied, because the residual stream is changed in place
                captured[:, self.capture.index(i)] = residual
            if i == len(self.layers) - 1 and context.last is not None:
                context = context.last
            added, residual = layer(normed, residual, angles[self.rotary[i]], context)
            unsummed = layer.unsummed  # type: ignore[assignment]
            residual = context.deepened(i, residual)
            tail: LayerTail | None = layer.tail  # type: ignore[assignment]
            if tail is not None:
                assert added is not None and unsummed.size == 1, "the stream needs the layer's whole output"
                residual = tail(residual.add_(added), None if inputs is None else context.attending_rows(inputs[i]))
                added = None
        if added is None:
            hidden = self.norm(residual)
        else:
            hidden, residual = self.norm.add(added, residual, unsummed)
        if len(self.layers) in self.capture:
            captured[:, self.capture.index(len(self.layers))] = residual
        return DecoderOutput(hidden, captured.flatten(1) if self.capture else None)
