"""The DFlash head over whole sequences, with a block after each anchor position, and with gradients.

The engine serves the same files with `aerie.speculative.drafts.blocks.dflash`, which reads KV from pages;
`tests/speculative/training/test_training_blocks.py` compares the two. Parameter names are those of the published heads.
`block_kinds` has the heads whose rows depend on the previous token. Paper: DFlash, arXiv 2602.06036.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, rotate_half

from aerie.speculative.drafts.blocks.dflash import DFlash
from aerie.speculative.training import TrainingError
from aerie.speculative.training.draft import DraftVocabulary, TrainedDraft, Unrolling
from aerie.speculative.training.layers import linear, prepared, qwen3_config
from aerie.speculative.training.losses import BlockScores, Objective, block_loss
from aerie.speculative.training.samples import Batch

_MAX_CAPTURED = 5  # captured target layers, as in z-lab's heads
_BLOCKS_AT_ONCE = 64  # bounds the memory of scores when blocks start at all positions


@dataclass(frozen=True)
class BlockContext:
    """The text before the blocks, which their rows attend to.

    features: [B, T, H] of the text.
    angles: rotary angles of its positions.
    visible: [B, M, T] bool, the positions before each block.
    within: [B or 1, M or 1, R or 1, R] bool, the rows of each block that each of its rows sees; None for all.
    """

    features: Tensor
    angles: tuple[Tensor, Tensor]
    visible: Tensor
    within: Tensor | None


def block_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float,
    dropout: float = 0.0,
    *,
    context: BlockContext,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the attention of the rows of M blocks to the context before each and to one another, as transformers'
    `AttentionInterface`.

    module: Qwen3's attention, which projects the context to keys and values.
    query: [B, heads, M * R, head_dim].
    key, value: [B, kv_heads, M * R, head_dim].
    Returns [B, M * R, heads, head_dim].
    """
    query, key = (part.to(value.dtype) for part in (query, key))  # rotated in float32
    (batch, kv_heads, _, head_dim), (_, blocks, length) = key.shape, context.visible.shape
    shape = (batch, length, kv_heads, head_dim)
    context_key = module.k_norm(module.k_proj(context.features).view(shape)).transpose(1, 2)
    cos, sin = (part.unsqueeze(1) for part in context.angles)
    context_key = (context_key * cos + rotate_half(context_key) * sin).to(value.dtype)
    context_value = module.v_proj(context.features).view(shape).transpose(1, 2)
    # by group: [B, kv_heads, group, M * R, d] and [B, kv_heads, 1, T, d]; by block: [B, kv_heads, group or 1, M, R, d]
    query = query.reshape(batch, kv_heads, -1, query.shape[2], head_dim) * scaling
    context_scores = query @ context_key.unsqueeze(2).transpose(-1, -2)
    rows = query.shape[3] // blocks
    hidden = ~context.visible.repeat_interleave(rows, dim=1)[:, None, None]
    context_scores = context_scores.masked_fill(hidden, float("-inf"))
    own_key, own_value = (part.view(batch, kv_heads, 1, blocks, rows, head_dim) for part in (key, value))
    by_block = (*query.shape[:3], blocks, rows, -1)
    block_scores = query.view(by_block) @ own_key.transpose(-1, -2)
    if context.within is not None:
        block_scores = block_scores.masked_fill(~context.within[:, None, None], float("-inf"))
    scores = torch.cat((context_scores, block_scores.flatten(3, 4)), dim=-1)
    weights = torch.softmax(scores.float(), dim=-1).to(query.dtype)
    attended = weights[..., :length] @ context_value.unsqueeze(2)
    own = weights[..., length:].reshape(by_block) @ own_value
    return (attended + own.flatten(3, 4)).flatten(1, 2).transpose(1, 2), None


AttentionInterface.register(block_attention.__name__, block_attention)


class BlockHead(TrainedDraft):
    """The trainable head; embedding and vocabulary head are the target's and are not trained."""

    mask_embedding: Tensor

    def __init__(self, method: DFlash, objective: Objective) -> None:
        super().__init__(method, method.model)
        self.method, self.objective, model = method, objective, method.model
        self.causal = read_causal(method)
        self.fc = linear(len(method.capture) * model.hidden_size, model.hidden_size)
        self.hidden_norm, self.norm = (Qwen3RMSNorm(model.hidden_size, eps=model.rms_eps) for _ in range(2))
        config = qwen3_config(model, block_attention)
        self.layers = nn.ModuleList([self.make_layer(config) for _ in range(model.num_layers)])
        prepared(self)

    def make_layer(self, config: PreTrainedConfig) -> nn.Module:
        """Return one layer, with the arguments of Qwen3's."""
        layer: nn.Module = Qwen3DecoderLayer(config, 0)
        return layer

    def initialise(self) -> None:
        """Initialise the parameters that a subclass adds; the linear layers are initialised already."""

    def use_target(self, target: PreTrainedModel) -> None:
        """Embed mask tokens and compute logits with the target's modules."""
        super().use_target(target)
        weight: Tensor = target.get_input_embeddings().weight
        mask = weight[self.method.form.mask_token_id].detach()
        self.register_buffer("mask_embedding", mask.clone(), persistent=False)

    def batch_loss(
        self,
        model: nn.Module,
        target: PreTrainedModel,
        vocabulary: DraftVocabulary,
        batch: Batch,
        unrolling: Unrolling,
    ) -> Tensor:
        return block_loss(self, self.objective, model, target, batch, unrolling)

    def unroll(self, embeddings: Tensor, captured: Tensor, num_steps: int) -> list[Tensor]:
        """Return the states of the rows that predict token n + s + 2, after the final norm; a block starts at every n +
        1."""
        return list(torch.cat(list(self._all_states(embeddings, captured, num_steps)), dim=1).unbind(2))

    def proposals(self, embeddings: Tensor, captured: Tensor, tokens: Tensor, num_steps: int) -> list[Tensor]:
        length, device = tokens.shape[1], tokens.device
        positions = torch.arange(length, device=device).unsqueeze(1) + 1 + torch.arange(num_steps, device=device)
        previous = tokens[:, positions.clamp(max=length - 1)]
        parts, start = [], 0
        for states in self._all_states(embeddings, captured, num_steps):
            end = start + states.shape[1]
            parts.append(self.best(self.score(states, previous[:, start:end])))
            start = end
        return list(torch.cat(parts, dim=1).unbind(2))

    def forward(
        self, embeddings: Tensor, captured: Tensor, anchors: Tensor, previous: Tensor, depths: Tensor | None = None
    ) -> BlockScores:
        """Return the scores of the blocks after anchors [B, M], [B, M, S, ..]; previous: [B, M, S] int64, the token
        before the one that each row predicts. depths: see `states`."""
        return self.score(self.states(embeddings, captured, anchors, previous.shape[2], depths), previous)

    def score(self, states: Tensor, previous: Tensor) -> BlockScores:
        """Return the scores of rows. states: [.., H]. previous: [..] int64, the previous token."""
        return BlockScores(self.logits(states))

    def best(self, scores: BlockScores) -> Tensor:
        """Return the tokens [..] that the engine drafts."""
        return scores.logits.argmax(-1)

    def states(
        self, embeddings: Tensor, captured: Tensor, anchors: Tensor, num_steps: int, depths: Tensor | None = None
    ) -> Tensor:
        """Return the states [B, M, num_steps, H] of blocks whose newest token is n + 1 and whose context is the
        features of positions 0..n, for the positions n in anchors [B, M] int64. depths: [B, M] int64, the number of
        steps in each block, whose later states are meaningless; None: num_steps for all."""
        batch, length, hidden = embeddings.shape
        rows = num_steps + (not self.method.form.from_anchor)
        context = self.hidden_norm(self.fc(captured))
        newest = (anchors + 1).clamp(max=length - 1).unsqueeze(2).expand(-1, -1, hidden)
        masks = self.mask_embedding.to(embeddings.dtype).expand(batch, anchors.shape[1], rows - 1, hidden)
        x = torch.cat((embeddings.gather(1, newest).unsqueeze(2), masks), dim=2)
        steps, positions = (torch.arange(count, device=anchors.device) for count in (rows, length))
        within = self._within(steps, None if depths is None else depths + (rows - num_steps))
        seen = BlockContext(context, self.angles(positions[None]), positions <= anchors.unsqueeze(2), within)
        angles = self.angles((anchors.unsqueeze(2) + 1 + steps).flatten(1))
        x = x.flatten(1, 2)
        for layer in self.layers:
            x = layer(x, position_embeddings=angles, context=seen)
        states: Tensor = self.norm(x.unflatten(1, (-1, rows))[:, :, rows - num_steps :])  # type: ignore[no-untyped-call]
        return states

    def _within(self, rows: Tensor, depths: Tensor | None) -> Tensor | None:
        """Return `BlockContext.within`. rows: [R] int64, 0 to R - 1. depths: [B, M] rows of each block; None: all."""
        live = None if depths is None else (rows < depths.unsqueeze(2)).unsqueeze(2)
        if not self.causal:
            return live
        before = (rows <= rows.unsqueeze(1))[None, None]
        return before if live is None else before & live

    def _all_states(self, embeddings: Tensor, captured: Tensor, num_steps: int) -> Iterator[Tensor]:
        """Yield the states of blocks after all positions, [B, up to _BLOCKS_AT_ONCE, num_steps, H] at a time."""
        positions = torch.arange(embeddings.shape[1], device=embeddings.device).expand(embeddings.shape[0], -1)
        for part in torch.split(positions, _BLOCKS_AT_ONCE, 1):
            yield self.states(embeddings, captured, part, num_steps)


def read_causal(method: DFlash) -> bool:
    """Return whether a row of the head sees the block up to itself, not the whole of it. Raises `TrainingError` for a
    head whose layers differ in what they see."""
    views = set(method.form.views)
    if len(views) > 1 or any(view.context is not None for view in views):
        raise TrainingError(f"draft={method.path}: has layers with windows, which can be served but not trained")
    return views.pop().causal


def captured_layers(num_layers: int) -> list[int]:
    """Return the layers whose output a head reads: up to five, from the second to the third last. Targets of fewer than
    six layers: all but the last."""
    steps = min(_MAX_CAPTURED, num_layers - 3) - 1
    if steps < 2:
        return list(range(num_layers - 1))
    return [round(1 + i * (num_layers - 4) / steps) for i in range(steps + 1)]
