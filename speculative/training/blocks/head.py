"""The DFlash head over whole sequences, with a block after each anchor position, and with gradients.

The engine serves the same files with `speculative.drafts.blocks.dflash`, which reads KV from pages;
`tests/speculative/training/test_training_blocks.py` compares the two. Parameter names are those of the published heads.
`conditional` has the heads whose rows depend on the token before. Paper: DFlash, arXiv 2602.06036.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention.rotation import rotate
from speculative.drafts.blocks.dflash import DFlash
from speculative.training.blocks.loss import BlockScores, Objective, block_loss
from speculative.training.draft import DraftVocabulary, TrainedDraft, Unrolling
from speculative.training.eagle3 import GatedMLP, RMSNorm, linear
from speculative.training.samples import Batch
from workers.layers.rotary import frequencies
from workers.models.llama import LlamaConfig

_BLOCKS_AT_ONCE = 64  # bounds the memory of scores when blocks start at all positions


class BlockAttention(nn.Module):
    """Rows of a block attend to the context before it and to one another."""

    def __init__(self, model: LlamaConfig) -> None:
        super().__init__()
        self.head_dim, self.num_kv_heads = model.head_dim, model.num_kv_heads
        self.q_proj = linear(model.hidden_size, model.num_heads * model.head_dim)
        self.k_proj = linear(model.hidden_size, model.num_kv_heads * model.head_dim)
        self.v_proj = linear(model.hidden_size, model.num_kv_heads * model.head_dim)
        self.o_proj = linear(model.num_heads * model.head_dim, model.hidden_size)
        self.q_norm, self.k_norm = (RMSNorm(model.head_dim, eps=model.rms_eps) for _ in range(2))

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        angles: Tensor,
        context_angles: Tensor,
        visible: Tensor,
        within: Tensor | None = None,
    ) -> Tensor:
        """Return [B, M, R, H].

        x: [B, M, R, H] blocks. context: [B, T, H]. angles: [B, M, R, head_dim / 2]. context_angles: [T, head_dim / 2].
        visible: [B, M, T] bool, the context of each block. within: [B, M, R] bool, the rows of each block that its rows
        see; None for all.
        """
        batch, blocks, rows, _ = x.shape
        shape = (batch, blocks * rows, -1, self.head_dim)
        query = self._rotate(self.q_norm(self.q_proj(x).view(shape)), angles.flatten(1, 2))
        key = self._rotate(self.k_norm(self.k_proj(x).view(shape)), angles.flatten(1, 2))
        value = self.v_proj(x).view(shape)
        context_angles = context_angles.expand(batch, -1, -1)
        context_shape = (batch, context.shape[1], -1, self.head_dim)
        context_key = self._rotate(self.k_norm(self.k_proj(context).view(context_shape)), context_angles)
        context_value = self.v_proj(context).view(context_shape)
        # [B, kv_heads, group, M * R, d] and [B, kv_heads, 1, T, d]; own blocks as [B, kv_heads, group or 1, M, R, d]
        query = query.transpose(1, 2).reshape(batch, self.num_kv_heads, -1, blocks * rows, self.head_dim)
        query = query * self.head_dim**-0.5
        context_scores = query @ context_key.permute(0, 2, 3, 1).unsqueeze(2)
        hidden = ~visible.repeat_interleave(rows, dim=1)[:, None, None]
        context_scores = context_scores.masked_fill(hidden, float("-inf"))
        own_key, own_value = (
            each.view(batch, blocks, rows, -1, self.head_dim).permute(0, 3, 1, 2, 4).unsqueeze(2)
            for each in (key, value)
        )
        by_block = (*query.shape[:3], blocks, rows, -1)
        block_scores = query.view(by_block) @ own_key.transpose(-1, -2)
        if within is not None:
            block_scores = block_scores.masked_fill(~within[:, None, None, :, None], float("-inf"))
        scores = torch.cat((context_scores, block_scores.flatten(3, 4)), dim=-1)
        weights = torch.softmax(scores.float(), dim=-1).to(query.dtype)
        attended = weights[..., : context.shape[1]] @ context_value.transpose(1, 2).unsqueeze(2)
        own = weights[..., context.shape[1] :].reshape(by_block) @ own_value
        attended = attended + own.flatten(3, 4)
        mixed: Tensor = self.o_proj(attended.flatten(1, 2).transpose(1, 2).reshape(batch, blocks, rows, -1))
        return mixed

    def _rotate(self, x: Tensor, angles: Tensor) -> Tensor:
        """Rotate x [B, n, heads, head_dim] by angles [B, n, head_dim / 2]."""
        flat = angles.flatten(0, 1)
        return rotate(x.flatten(0, 1), flat.cos(), flat.sin()).view(x.shape)


class BlockLayer(nn.Module):
    """Qwen3's layer."""

    def __init__(self, model: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = BlockAttention(model)
        self.mlp = GatedMLP(model.hidden_size, model.intermediate_size)
        self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(model.hidden_size, eps=model.rms_eps) for _ in range(2)
        )

    def forward(self, x: Tensor, *others: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *others)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class BlockHead(TrainedDraft):
    """The trainable head; embedding and vocabulary head are the target's and are not trained."""

    frequencies: Tensor
    mask_embedding: Tensor

    def __init__(self, method: DFlash, objective: Objective) -> None:
        super().__init__()
        self.method, self.objective, model = method, objective, method.model
        self.fc = linear(len(method.capture) * model.hidden_size, model.hidden_size)
        self.hidden_norm, self.norm = (RMSNorm(model.hidden_size, eps=model.rms_eps) for _ in range(2))
        self.layers = nn.ModuleList([self.make_layer() for _ in range(model.num_layers)])
        self.register_buffer("frequencies", frequencies(model.rope, model.head_dim), persistent=False)
        self._target_head: list[nn.Module] = []  # in a list, so that it is not a submodule and not trained

    def make_layer(self) -> nn.Module:
        """Return one layer, with `BlockLayer`'s arguments."""
        return BlockLayer(self.method.model)

    def initialise(self) -> None:
        """Initialise the parameters that a subclass adds; the linear layers are initialised already."""

    def use_target(self, target: PreTrainedModel) -> None:
        """Embed mask tokens and compute logits with the target's modules."""
        self._target_head = [target.get_output_embeddings()]
        weight: Tensor = target.get_input_embeddings().weight
        mask = weight[self.method.form.mask_token_id].detach()
        self.register_buffer("mask_embedding", mask.clone(), persistent=False)

    def features(self, output: Any) -> Tensor:
        return torch.cat([output.hidden_states[layer] for layer in self.method.capture], dim=-1)

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

    def forward(  # type: ignore[override]
        self, embeddings: Tensor, captured: Tensor, anchors: Tensor, previous: Tensor, depths: Tensor | None = None
    ) -> BlockScores:
        """Return the scores of the blocks after anchors [B, M], [B, M, S, ..]; previous: [B, M, S] int64, the token
        before the one that each row predicts. depths: see `states`."""
        return self.score(self.states(embeddings, captured, anchors, previous.shape[2], depths), previous)

    def score(self, states: Tensor, previous: Tensor) -> BlockScores:
        """Return the scores of rows. states: [.., H]. previous: [..] int64, the token before."""
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
        steps = torch.arange(rows, device=anchors.device)
        angles = (anchors.unsqueeze(2) + 1 + steps).unsqueeze(3) * self.frequencies
        positions = torch.arange(length, device=anchors.device)
        visible = positions <= anchors.unsqueeze(2)
        within = None if depths is None else steps < depths.unsqueeze(2) + (rows - num_steps)
        for layer in self.layers:
            x = layer(x, context, angles, positions.unsqueeze(1) * self.frequencies, visible, within)
        states: Tensor = self.norm(x[:, :, rows - num_steps :])
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [.., vocabulary] logits of states [.., H], in the dtype of the target's head."""
        head = self._target_head[0]
        logits: Tensor = head(hidden.to(next(head.parameters()).dtype))
        return logits

    def _all_states(self, embeddings: Tensor, captured: Tensor, num_steps: int) -> Iterator[Tensor]:
        """Yield the states of blocks after all positions, [B, up to _BLOCKS_AT_ONCE, num_steps, H] at a time."""
        positions = torch.arange(embeddings.shape[1], device=embeddings.device).expand(embeddings.shape[0], -1)
        for part in torch.split(positions, _BLOCKS_AT_ONCE, 1):
            yield self.states(embeddings, captured, part, num_steps)
