"""Drafts a tree of one shape, from the draft's recurrent state after the newest token; and `DraftLayer`, the decoder
layer of EAGLE and EAGLE-3 models, without a norm before its attention.

The first step reads the result of draft-extend. Step s after it writes KV to suffix columns (s - 1) * top_k onwards;
the suffix is discarded after the round. For random requests the target's noise (`aerie.workers.sampling`) and filters
are applied to the scores, so that the draft proposes what the target is likely to draw."""

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from aerie.kernels.kv.batches import DecodeBatch, Mode, PrefillBatch, causal_mask
from aerie.kernels.rope.rope_store import Angles
from aerie.kernels.tree.nodes import Candidates, Children, Level, chain
from aerie.kernels.tree.tree_growth import grow
from aerie.speculative.drafts.guidance import Guidance
from aerie.speculative.drafts.method import DraftModel
from aerie.speculative.tree_shape import TreeShape
from aerie.speculative.tree_table import TreeTable
from aerie.workers.distributed.tp_group import SOLO, TPGroup
from aerie.workers.layers.forward_context import Attending, ForwardContext
from aerie.workers.layers.norm import RMSNorm
from aerie.workers.lora.layers import AdapterRows
from aerie.workers.models.llama import LlamaConfig, make_attention, make_mlp
from aerie.workers.runner.model_runner import ModelRunner
from aerie.workers.sampling import Rows, Sampler, SamplingNeeds
from aerie.workers.slots import SlotTable

BatchT = TypeVar("BatchT", DecodeBatch, PrefillBatch)


@dataclass(frozen=True)
class DraftRunner(ModelRunner[DraftModel]):
    """Runs the draft, which has its own KV pool. Page ids are the target's, so pages before the draft's window are
    freed only with the target's.

    window: maximum tokens that a row sees; None: all. A windowed draft works as at the start of a text, because RoPE
        depends only on differences of positions.
    row_index: tells layers with adapters their rows' requests; None without adapters. `begin` says whether a pass has
        rows with one.
    """

    window: int | None = None
    row_index: AdapterRows | None = None

    def begin(self, adapted: bool) -> None:
        """Run the passes that follow for rows with adapters, or without."""
        if self.row_index is not None:
            self.row_index.is_active = adapted

    def extend(
        self,
        ids: Tensor,
        features: Tensor,
        decode: DecodeBatch | None,
        chunks: PrefillBatch | None,
        attending: Attending | None,
    ) -> Tensor:
        """Run `DraftModel.extend` over the rows of `decode` and `chunks`."""
        return self.model.extend(ids, features, self.context(decode, None, chunks, attending))

    def keep(self, ids: Tensor, features: Tensor, decode: DecodeBatch | None, chunks: PrefillBatch | None) -> None:
        """Run `DraftModel.keep` over the rows of `decode` and `chunks`."""
        self.model.keep(ids, features, self.context(decode, None, chunks, Attending.none(ids.device)))

    def context(
        self,
        decode: DecodeBatch | None,
        decode_positions: Tensor | None = None,
        chunks: PrefillBatch | None = None,
        attending: Attending | None = None,
    ) -> ForwardContext:
        """Build a context; see `ModelRunner`. Only the last draft layer attends for `attending` alone; earlier layers
        compute every row, because later layers' KV is computed from their output."""
        if chunks is not None and chunks.inputs is not None:  # drafts see the placeholders' ids, at KV positions
            chunks = replace(chunks, inputs=None)
        context = self._context(decode, decode_positions, chunks, attending)
        if self.row_index is not None and self.row_index.is_active:
            context = replace(context, adapted=True)
            self.row_index.enter(context, True)
        return context

    def _context(
        self,
        decode: DecodeBatch | None,
        decode_positions: Tensor | None,
        chunks: PrefillBatch | None,
        attending: Attending | None,
    ) -> ForwardContext:
        """Return the context of a draft's pass. With `window`, layers see the last `window` tokens only; if only some
        rows attend, this holds for the last layer (`ForwardContext.last`), because later layers read the KV of all
        rows."""
        if self.window is not None:
            decode, chunks = self._windowed(decode), self._windowed(chunks)
            if attending is not None:
                seen = self._windowed(attending.decode), self._windowed(attending.chunks)
                attending = Attending(attending.rows, *seen)
        if attending is None or self.model.num_layers == 1:
            return super().context(decode, decode_positions, chunks, attending)
        last = super().context(decode, decode_positions, chunks, attending)
        return replace(super().context(decode, decode_positions, chunks), last=last)

    def _windowed(self, batch: BatchT | None) -> BatchT | None:
        if batch is None or (batch.window is not None and self.window is not None and batch.window < self.window):
            return batch
        return replace(batch, window=self.window)


@dataclass(frozen=True)
class TargetKVRunner(DraftRunner):
    """Runs a draft that attends to the target's KV (`DraftMethod.reads_target_kv`) and writes none. All rows of a round
    attend to the committed tokens. Their query position is that of the newest token, which has no KV yet.

    pool: the target's KV pool.
    """

    def extend(
        self,
        ids: Tensor,
        features: Tensor,
        decode: DecodeBatch | None,
        chunks: PrefillBatch | None,
        attending: Attending | None,
    ) -> Tensor:
        """Run the rows that attend; the others would only write KV."""
        if attending is not None:
            ids, features = ids.index_select(0, attending.rows), features.index_select(0, attending.rows)
            decode, chunks = attending.decode, attending.chunks
        return super().extend(ids, features, decode, chunks, None)

    def keep(self, ids: Tensor, features: Tensor, decode: DecodeBatch | None, chunks: PrefillBatch | None) -> None:
        pass

    def context(
        self,
        decode: DecodeBatch | None,
        decode_positions: Tensor | None = None,
        chunks: PrefillBatch | None = None,
        attending: Attending | None = None,
    ) -> ForwardContext:
        """Build a context in which all rows have the position of the last committed token, also in draft steps, whose
        rows would otherwise have later positions."""
        if decode is not None and decode.mode is Mode.DRAFT_DECODE:
            last = (decode.prefix_len - 1).clamp_min(0)  # the padding slot has no tokens
            mask = torch.ones_like(decode.mask)
            decode = replace(decode, suffix_len=decode.rows, prefix_len=last, mask=mask)
            decode_positions = last.long().repeat_interleave(decode.rows)
        context = super().context(decode, decode_positions, chunks, attending)
        return replace(context, positions=context.positions + 1)


@dataclass(frozen=True)
class DraftBatch:
    """Requests that get new trees. Rows without drafting have the padding slot, whose KV goes to the dummy page.

    slots: [B] int64.
    hidden: [B, H] recurrent state after the newest token; None for block drafts, which have none.
    page_table: [B, max_pages] int32.
    max_kv_len: host-side bound above the positions that are read or written.
    guidance: grammars of the batch; None without grammars.
    """

    slots: Tensor
    hidden: Tensor | None
    page_table: Tensor
    max_kv_len: int
    needs: SamplingNeeds
    guidance: Guidance | None = None


class Drafter:
    """Drafts trees of one shape for given slots, into `trees`."""

    def __init__(
        self, shape: TreeShape, trees: TreeTable, runner: DraftRunner, slots: SlotTable, sampler: Sampler
    ) -> None:
        self._shape = shape
        self._steps = shape.steps
        self._trees = trees
        self._runner = runner
        self._slots = slots
        self._sampler = sampler
        shard = runner.model.lm_head.shard
        own = torch.arange(shard.first, shard.first + shard.size, device=slots.device)
        self._token_ids = runner.model.to_target(own.clamp_max(shard.vocab_size - 1))
        # [num_steps, 1, 1]: step s of a chain sees its own suffix column and all before it
        self._chain_masks = causal_mask(1, shape.num_steps, slots.device).view(-1, 1, 1)
        # [num_steps - 1, 1, top_k]: positions of step s's rows: s - 1 after the committed length
        levels = torch.arange(shape.num_steps - 1, device=slots.device)
        self._level_positions = levels.view(-1, 1, 1).expand(-1, 1, shape.top_k).contiguous()
        self._depths = torch.tensor(shape.candidate_depths, device=slots.device)

    def draft(self, batch: DraftBatch) -> None:
        """Draft trees for requests whose newest token is committed."""
        if self._shape.is_chain:
            self._draft_chain(batch)
        else:
            self._draft_tree(batch)

    def _draft_chain(self, batch: DraftBatch) -> None:
        """Draft a chain: each step takes the best token, which is the next step's input."""
        slots, length = batch.slots, self._slots.seq_len[batch.slots]
        head, hidden = self._runner.model, batch.hidden
        assert hidden is not None
        tokens: list[Tensor] = []
        for step in self._steps:
            if tokens:
                suffix = step.suffix
                mask = self._chain_masks[suffix - 1].expand(slots.shape[0], 1)
                pages = batch.page_table, batch.max_kv_len
                decode = DecodeBatch(Mode.DRAFT_DECODE, 1, suffix, length, mask, *pages, slots=slots)
                hidden = head.step(tokens[-1], hidden, self._runner.context(decode))
            logits = self._scores(hidden, batch, length, step.depth, 1)
            best = head.to_target(head.lm_head.shard.argmax(logits))
            tokens.append(best if batch.guidance is None else batch.guidance.follow(best))
        self._trees.write(slots, chain(self._slots.bonus[slots], torch.stack(tokens, dim=1)))

    def _draft_tree(self, batch: DraftBatch) -> None:
        """Draft a tree level by level: each step scores the children of a level's nodes and `grow` chooses the next
        level."""
        length, k, state = self._slots.seq_len[batch.slots], self._shape.top_k, batch.hidden
        assert state is not None
        candidates = Candidates.empty(batch.slots.shape[0], self._depths, self._shape.num_steps)
        # [num_steps - 1, B * k]: a level's nodes share a position, and have consecutive suffix columns
        positions = (length.long().unsqueeze(1) + self._level_positions).flatten(1)
        level: Level | None = None
        for step in self._steps:
            if level is not None:
                suffix, mask = step.suffix, level.mask
                assert mask is not None, "`grow` computes it"
                pages = batch.page_table, batch.max_kv_len
                decode = DecodeBatch(Mode.DRAFT_DECODE, k, suffix, length, mask, *pages, slots=batch.slots)
                context = self._runner.context(decode, positions[step.depth - 2])
                # copies, because the draft may change them in place
                state = self._runner.model.step(level.tokens.flatten(), state.index_select(0, level.parent), context)
            children = self._best(state, batch, length, step.depth, step.rows)
            level = grow(candidates, level, children, step.first_candidate, step.suffix)
            if batch.guidance is not None and not step.is_last:
                batch.guidance.grown(level)
        self._trees.write_best(batch.slots, self._slots.bonus, candidates, self._shape.width)

    def _scores(self, hidden: Tensor, batch: DraftBatch, length: Tensor, depth: int, rows: int) -> Tensor:
        """Return [B * rows, shard size] logits of tokens at `depth`, with known grammar masks, and for random requests
        with the target's noise and filters."""
        logits = self._runner.model.logits(hidden)
        if batch.guidance is not None:
            batch.guidance.mask(logits, self._token_ids)
        return self._noisy(logits, batch, (length.long() + depth).unsqueeze(1).expand(-1, rows))

    def _noisy(self, logits: Tensor, batch: DraftBatch, positions: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return logits [B * R, n] with the target's noise and filters where a request is random.

        positions: [B, R] int64, positions of the tokens that the logits predict.
        ids: [B * R, n] int64 token ids that every rank has; None: logits are of this rank's shard.
        """
        if not batch.needs.random:
            return logits
        group = self._runner.model.lm_head.shard.group if ids is None else SOLO
        ids = self._token_ids if ids is None else ids
        return self._sampler.perturb(logits, Rows(batch.slots, positions), ids, batch.needs.filtered, group)

    def _best(self, hidden: Tensor, batch: DraftBatch, length: Tensor, depth: int, rows: int) -> Children:
        """Return the top_k tokens after hidden [B * rows, H], at `depth` of the trees."""
        head = self._runner.model
        scores = self._scores(hidden, batch, length, depth, rows)
        children = Children(*head.lm_head.shard.topk_log_softmax(scores, self._shape.top_k), head.target_ids)
        return children if batch.guidance is None else batch.guidance.children(children)


IGNORED_WEIGHTS = ("t2d", "*rotary_emb*")


def layer_names(layer: str) -> dict[str, str]:
    """Return `NameMap` rules for the layers named `layer`, which may have a hole."""
    return {
        f"{layer}.self_attn.qkv": f"{layer}.self_attn.{{part}}",
        f"{layer}.mlp.gate_up": f"{layer}.mlp.{{part}}",
        f"{layer}.{{block}}.{{module}}": f"{layer}.{{block}}.{{module}}",
        f"{layer}.{{norm}}": f"{layer}.{{norm}}",
    }


def same_names(*modules: str) -> dict[str, str]:
    """Return `NameMap` rules for modules named as in the checkpoint: embedding, vocabulary head, projection, final
    norm, and these."""
    return {name: name for name in ("embed_tokens", "lm_head", "fc", "norm", *modules)}


def joined_input(embedding: Tensor, feature: Tensor) -> Tensor:
    """Concatenate the normalised embedding of the next token and the normalised feature, [.., hidden] each. Also used
    in training."""
    return torch.cat((embedding, feature), dim=-1)


def projected(features: Tensor, input_norm: nn.Module | None, fc_norm: nn.ModuleList, fc: nn.Module) -> Tensor:
    """Project concatenated captured layers, [.., F], to [.., hidden], with EAGLE-3's optional norms. Also used in
    training."""
    if input_norm is not None:
        features = input_norm(features)
    if fc_norm:
        parts = features.chunk(len(fc_norm), dim=-1)
        features = torch.cat([norm(part) for norm, part in zip(fc_norm, parts, strict=True)], dim=-1)
    out: Tensor = fc(features)
    return out


class DraftLayer(nn.Module):
    """A Llama block without a norm before its attention. input_size: width of the attention's input."""

    def __init__(self, model: LlamaConfig, group: TPGroup, input_size: int) -> None:
        super().__init__()
        self.group = group
        self.self_attn = make_attention(model, 0, group, input_size)
        self.post_attention_layernorm = RMSNorm(model.hidden_size, model.rms_eps)
        self.mlp = make_mlp(model, group)

    def forward(self, x: Tensor, residual: Tensor, angles: Angles, context: ForwardContext) -> Tensor:
        """Return the residual stream after attention and MLP, [n, hidden] for the rows that attend. On a GPU `residual`
        changes in place.

        x: [rows, input_size].
        residual: [rows, hidden].
        """
        attended = self.self_attn.partial(x, angles, context)
        residual = context.attending_rows(residual).contiguous()
        normed, residual = self.post_attention_layernorm.add(attended, residual, self.group)
        out: Tensor = residual + self.mlp(normed)
        return out
