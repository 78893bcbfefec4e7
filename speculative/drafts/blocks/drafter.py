"""Drafts chains and trees from one pass over a block per request. Used by `aerie.speculative.decoding`.

The rows of the block write their KV after the committed positions, where the next round's target features overwrite it.
The depth-d nodes of a tree are the best tokens of row d. Rows of plain DFlash do not depend on the token chosen for the
row before, so all parents of a depth have the same children. Other heads score a row's tokens given the previous token;
for these, drafting is a beam search over path probabilities.
"""

from dataclasses import replace

import torch
from torch import Tensor

from aerie.kernels.kv.batches import DecodeBatch, Mode, causal_mask
from aerie.kernels.tree.nodes import Children, chain
from aerie.kernels.tree.tree_growth import grow_best, grow_block, level_rows
from aerie.kernels.vocabulary.topk_log_softmax import largest, topk_log_softmax
from aerie.speculative.drafts.blocks.dflash import Block, DFlashModel
from aerie.speculative.drafts.drafter import DraftBatch, Drafter, DraftRunner
from aerie.speculative.tree_shape import TreeShape
from aerie.speculative.tree_table import TreeTable
from aerie.workers.sampling import Sampler
from aerie.workers.slots import SlotTable


class BlockDrafter(Drafter):
    """Drafts from blocks. A shape with fewer levels than the block has rows runs a shorter block."""

    def __init__(
        self, shape: TreeShape, trees: TreeTable, runner: DraftRunner, slots: SlotTable, sampler: Sampler
    ) -> None:
        super().__init__(shape, trees, runner, slots, sampler)
        assert isinstance(runner.model, DFlashModel)
        self._model = runner.model
        form = runner.model.form
        num_masks = shape.num_steps - form.from_anchor
        self._mask_ids = torch.full((num_masks,), form.mask_token_id, device=slots.device)
        self._after = torch.arange(1, shape.num_steps + 1, device=slots.device)

    def draft(self, batch: DraftBatch) -> None:
        block = self._block(batch)
        at_once = batch.guidance is None and not self._model.conditional
        if self._shape.is_chain:
            (self._all_at_once if at_once else self._one_by_one)(batch, block)
        elif at_once:
            self._grow_at_once(batch, block)
        else:
            self._grow_by_levels(batch, block)

    def _block(self, batch: DraftBatch) -> Block:
        """Run the blocks; row d predicts the token at depth d + 1."""
        anchors = self._slots.bonus[batch.slots].unsqueeze(1)
        ids = torch.cat((anchors, self._mask_ids.expand(anchors.shape[0], -1)), dim=1)
        length = self._slots.seq_len[batch.slots]
        hidden = block_states(self._runner, ids, length, batch.page_table, batch.max_kv_len)
        states = hidden[:, hidden.shape[1] - self._shape.num_steps :]
        logits: Tensor = self._model.logits(states.flatten(0, 1)).unflatten(0, states.shape[:2])  # type: ignore[no-untyped-call]
        noisy = None
        if batch.needs.random and self._model.num_candidates:
            noisy = self._noisy(logits.flatten(0, 1), batch, length.long().unsqueeze(1) + self._after)
        return Block(states, logits, self._model.candidates_of(states, logits, noisy))

    def _all_at_once(self, batch: DraftBatch, block: Block) -> None:
        """Draft chains whose tokens do not depend on one another."""
        bonus = self._slots.bonus[batch.slots]
        logits = self._noisy_logits(batch, block)
        best = self._model.to_target(self._model.lm_head.shard.argmax(logits)).view(bonus.shape[0], -1)
        self._trees.write(batch.slots, chain(bonus, best))

    def _one_by_one(self, batch: DraftBatch, block: Block) -> None:
        """Draft chains whose tokens depend on the previous token, because of the head or a grammar."""
        bonus = self._slots.bonus[batch.slots]
        tokens, previous, state = [], bonus, None
        for step in self._steps:
            state = self._model.path_state(state, previous)
            previous = self._best_after(batch, block, step.depth, previous.unsqueeze(1), state)
            if batch.guidance is not None:
                previous = batch.guidance.follow(previous)
            tokens.append(previous)
        self._trees.write(batch.slots, chain(bonus, torch.stack(tokens, dim=1)))

    def _grow_at_once(self, batch: DraftBatch, block: Block) -> None:
        """Draft the best nodes of all levels, where all nodes of a level have the same children."""
        shape, head = self._shape, self._model
        best, ids = head.lm_head.shard.topk_log_softmax(self._noisy_logits(batch, block), shape.top_k)
        rows = (-1, shape.num_steps, shape.top_k)
        candidates = grow_block(Children(best.view(rows), ids.view(rows), head.target_ids), shape.width)
        self._trees.write_best(batch.slots, self._slots.bonus, candidates, shape.width)

    def _noisy_logits(self, batch: DraftBatch, block: Block) -> Tensor:
        """Return the [B * num_steps, shard size] logits of all rows of the blocks, with the target's noise and filters
        for random requests."""
        after = self._slots.seq_len[batch.slots].long().unsqueeze(1) + self._after
        return self._noisy(block.logits.flatten(0, 1), batch, after)

    def _grow_by_levels(self, batch: DraftBatch, block: Block) -> None:
        """Draft the best nodes of all levels. Under grammars at most top_k nodes of a level have children, because each
        is scored over the vocabulary."""
        shape, pool, level = self._shape, None, None
        previous = self._slots.bonus[batch.slots].unsqueeze(1)
        state = self._model.path_state(None, previous.flatten())
        for depth in range(1, shape.num_steps + 1):
            if state is not None and level is not None:
                state = self._model.path_state(state.index_select(0, level.parent), level.tokens.flatten())
            children = self._children(batch, block, depth, previous, state)
            rows = level_rows(depth, shape.num_steps, shape.top_k, shape.width)
            if batch.guidance is not None:
                rows = min(rows, shape.top_k)
            pool, level = grow_best(pool, level, children, depth, shape.width, rows)
            previous = level.tokens
            if batch.guidance is not None and depth < shape.num_steps:
                batch.guidance.grown(level)
        assert pool is not None, "a tree has levels"
        self._trees.write_best(batch.slots, self._slots.bonus, pool, shape.width)

    def _best_after(
        self, batch: DraftBatch, block: Block, depth: int, previous: Tensor, state: Tensor | None
    ) -> Tensor:
        """Return the [B] target ids of the best tokens at `depth` after previous [B, 1]. Arguments: `_scores_after`."""
        head = self._model
        if not self._scores_candidates(batch):
            return head.to_target(head.lm_head.shard.argmax(self._scores_after(batch, block, depth, previous, state)))
        scores, ids = self._candidates_after(batch, block, depth, previous, state)
        return self._from_first_rank(ids.gather(1, largest(scores)[1].unsqueeze(1)).squeeze(1))

    def _children(
        self, batch: DraftBatch, block: Block, depth: int, previous: Tensor, state: Tensor | None
    ) -> Children:
        """Return the top_k tokens at `depth` after each of previous [B, k]. Arguments: `_scores_after`."""
        head = self._model
        if self._scores_candidates(batch):
            scores, ids = self._candidates_after(batch, block, depth, previous, state)
            best, columns, _ = topk_log_softmax(scores, self._shape.top_k)
            return Children(self._from_first_rank(best), self._from_first_rank(ids.gather(1, columns)), None)
        scores = self._scores_after(batch, block, depth, previous, state)
        children = Children(*head.lm_head.shard.topk_log_softmax(scores, self._shape.top_k), head.target_ids)
        return children if batch.guidance is None else batch.guidance.children(children)

    def _scores_candidates(self, batch: DraftBatch) -> bool:
        """Return whether only the head's candidates are scored, not the vocabulary. With grammars the vocabulary is,
        because masks cover it."""
        return batch.guidance is None and self._model.num_candidates >= self._shape.top_k

    def _candidates_after(
        self, batch: DraftBatch, block: Block, depth: int, previous: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return scores and target ids, [B * k, num_candidates], of a row's candidates after previous [B, k].
        Arguments: `_scores_after`."""
        scores, ids = self._model.candidates_after(block, depth - 1, previous, state)
        ids = self._model.to_target(ids)
        return self._noisy(scores, batch, self._positions(batch, depth, previous), ids), ids

    def _from_first_rank(self, x: Tensor) -> Tensor:
        """Return the first rank's x, so that all ranks have the same tree even if their scores differ in a bit."""
        return self._model.lm_head.shard.group.all_gather(x)[0]

    def _positions(self, batch: DraftBatch, depth: int, previous: Tensor) -> Tensor:
        """Return the [B, k] positions of tokens at `depth` after previous [B, k]."""
        return (self._slots.seq_len[batch.slots].long().unsqueeze(1) + depth).expand(-1, previous.shape[1])

    def _scores_after(
        self, batch: DraftBatch, block: Block, depth: int, previous: Tensor, state: Tensor | None
    ) -> Tensor:
        """Return the logits of tokens at `depth` after each of `previous`: [B * k, shard size]. Known grammar masks are
        applied; random requests have the target's noise and filters.

        depth: tree level, from 1; row `depth` - 1 of the block predicts it.
        previous: [B, k] int64 target ids.
        state: [B * k, any] states of the paths to them, for heads that read whole paths (`DFlashModel.path_state`);
            None for others.
        """
        logits = self._model.after(block, depth - 1, previous, state)
        if batch.guidance is not None:
            batch.guidance.mask(logits, self._token_ids)
        return self._noisy(logits, batch, self._positions(batch, depth, previous))


def block_states(runner: DraftRunner, ids: Tensor, length: Tensor, page_table: Tensor, max_kv_len: int) -> Tensor:
    """Run one block per request, [B, R, H] after the final norm. Writes its KV to positions `length` onwards.

    ids: [B, R] int64 anchors and mask tokens.
    length: [B] int32 tokens before the block, whose KV `keep` has written.
    page_table: [B, max_pages] int32.
    max_kv_len: host-side bound of length + R.
    """
    model, (batch, rows) = runner.model, ids.shape
    assert isinstance(model, DFlashModel)
    masks = causal_mask(batch, rows, ids.device), torch.full_like(ids, (1 << rows) - 1)
    contexts = {}
    for view in dict.fromkeys(model.form.views):
        mask, window = masks[not view.causal], view.window(rows)
        decode = DecodeBatch(
            Mode.DRAFT_DECODE,
            rows,
            suffix_len=rows,
            prefix_len=length,
            mask=mask,
            page_table=page_table,
            max_kv_len=max_kv_len,
        )
        contexts[view] = runner.context(replace(decode, chain=view.causal, window=window))
    return model.block(ids, [contexts[view] for view in model.form.views]).view(batch, rows, -1)
