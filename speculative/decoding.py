"""`SpeculativeDecoding`: one step of an engine with a draft.

verify -> accept -> commit -> draft-extend -> draft -> tree build. With `method: suffix`, drafts are copied from the
text (`aerie.speculative.suffix_drafts`), without draft-extend and draft pass. The next step verifies the trees that a
step drafts.

Prompt chunks share the passes of target and draft: each stage has a half for rounds and a half for chunks, and
`aerie.workers.runner.batch.RowLayout` says which rows belong to which. A `DraftModel` hides how a draft works;
verification only sees tokens.
"""

from dataclasses import replace

import torch
from torch import Tensor

from aerie.kernels.capability import Capability
from aerie.kernels.drafting.suffix_match import MatchLimits
from aerie.kernels.kv.batches import DecodeBatch, Mode, causal_mask
from aerie.kernels.kv.tree_masks import seen_columns
from aerie.kernels.tree.acceptance import accept_commit
from aerie.kernels.tree.nodes import RoundRows
from aerie.speculative.drafts.blocks.drafter import BlockDrafter
from aerie.speculative.drafts.drafter import DraftBatch, Drafter, DraftRunner
from aerie.speculative.drafts.guidance import Guidance
from aerie.speculative.step_parts import DraftBacklog, Finals, Rounds, TargetPass, ids_after, step_tensors
from aerie.speculative.suffix_drafts import SuffixDrafts
from aerie.speculative.tree_shape import TreeShape
from aerie.speculative.tree_table import TreeTable
from aerie.workers.config import RoundShape, RoundShapes
from aerie.workers.layers.forward_context import Attending
from aerie.workers.models.decoder import DecoderOutput
from aerie.workers.runner.batch import PromptChunks, StepBatch, StepTensors, joined, prompt_hidden
from aerie.workers.runner.decoding import CuttableStrategy, begin_finals, ranking_of
from aerie.workers.runner.model_runner import TargetRunner
from aerie.workers.sampling import Rows, Sampled, Sampler
from aerie.workers.slots import SlotTable
from aerie.workers.structured_output.mask_table import MaskTable


class SpeculativeDecoding(CuttableStrategy):
    """A `aerie.workers.runner.decoding.DecodingStrategy`. Shape 0 decodes without speculation and keeps the draft's KV
    up to date; the others are `TreeShape`s.

    draft: None without a draft model.
    synthetic_acceptance_length: see `SpeculativeConfig`.
    matches: matches in the requests' text, from which drafts are copied; None without such drafts.
    """

    def __init__(
        self,
        shapes: RoundShapes,
        target: TargetRunner,
        draft: DraftRunner | None,
        slots: SlotTable,
        sampler: Sampler,
        masks: MaskTable,
        synthetic_acceptance_length: float | None = None,
        matches: MatchLimits | None = None,
    ) -> None:
        self._shapes = shapes
        self._synthetic_acceptance_length = synthetic_acceptance_length
        self._target = target
        self._draft = draft
        self._slots = slots
        self._sampler = sampler
        self._masks = masks
        wide = [shape for shape in shapes.shapes if shape.width > 1]
        chains, width = all(shape.is_chain for shape in wide), max(shape.width for shape in wide)
        self._trees = TreeTable(slots.padding_slot, width, chains, slots.device)
        trees = [shape for shape in wide if isinstance(shape, TreeShape)]
        self._blocks = draft is not None and draft.model.drafts_blocks
        drafter = BlockDrafter if self._blocks else Drafter
        self._drafters = {
            shape: drafter(shape.model_part, self._trees, draft, slots, sampler) for shape in trees if draft
        }
        num_copied = max((shape.branch for shape in trees), default=width - 1)
        self._suffix = SuffixDrafts.of(slots, self._trees, matches, num_copied) if matches is not None else None
        columns = {shape.max_new_tokens for shape in shapes.shapes}
        self._causal = {rows: causal_mask(1, rows, slots.device) for rows in columns}
        delays = shapes.eager and Capability.of(slots.device).shares_host_memory
        has_kv = draft is not None and not draft.model.reads_target_kv
        self._backlog = DraftBacklog(draft, slots) if draft is not None and has_kv and delays else None
        # also of prompt chunks
        self._every_row = target.records_experts or (draft is not None and draft.model.reads_last_layer)

    @property
    def shapes(self) -> RoundShapes:
        return self._shapes

    def forward(self, batch: StepBatch) -> TargetPass:
        shape = self._shapes[batch.shape]
        rows = self._read_trees(batch, shape)
        return self._run_target(batch, shape, rows, self._slots.page_table[batch.slots])

    def choose(self, batch: StepBatch, passed: TargetPass) -> StepTensors:
        """Verify trees, sample first tokens, commit, and draft the next trees, after the target's pass."""
        shape, chunks = self._shapes[batch.shape], batch.chunks
        logits = self._target.logits(passed.hidden, batch.head_slots(shape.width))
        rounds = self._verify(batch, shape, passed, logits) if batch.num_requests else None
        finals = self._first_tokens(batch, chunks, logits) if chunks is not None and chunks.num_finals else None
        hidden = self._extend(batch, rounds, finals, passed)
        num_correct = None if self._suffix is None else self._recorded(self._suffix, batch, rounds, finals)
        matches = self._draft_next(batch, hidden, rounds, finals)
        drafts = self._trees.drafted(batch.entry_slots) if batch.needs.masked else None
        ranking = ranking_of(self._target, batch, passed.prompt_hidden)
        copied = None
        if num_correct is not None and matches is not None:
            copied = torch.stack((num_correct, matches, self._num_copied(shape, rounds, num_correct)), dim=1)
        return step_tensors(batch, rounds, finals, drafts, ranking, copied)

    def _read_trees(self, batch: StepBatch, shape: RoundShape) -> RoundRows:
        """Return the trees to verify. Their masks go to the verifying backend's own buffer, if it has one."""
        mask_words = None
        if shape.width > 1 and batch.num_requests:
            backend = self._target.backends[Mode.VERIFY]
            mask_words = backend.tree_mask_buffer(batch.num_requests, shape.width, self._slots.device)
        return self._trees.read(batch.slots, shape, self._slots.seq_len, mask_words)

    def _run_target(self, batch: StepBatch, shape: RoundShape, rows: RoundRows, page_table: Tensor) -> TargetPass:
        """Run one pass over the rows of rounds and chunks."""
        chunks, layout = batch.chunks, batch.rows(shape.width)
        verify = positions = None
        if batch.num_requests:
            verify = DecodeBatch(
                Mode.VERIFY if shape.width > 1 else Mode.DECODE,
                shape.width,
                suffix_len=shape.width,
                prefix_len=rows.length,
                mask=rows.tree.masks,
                page_table=page_table,
                max_kv_len=batch.max_kv_len,
                mask_words=rows.mask_words,
                chain=shape.is_chain,
                slots=batch.slots,
            )
            positions = rows.positions
            if batch.is_shifted:
                positions = positions + self._slots.shifts[batch.slots].repeat_interleave(shape.width)
        ids = joined((rows.ids, chunks.ids if chunks else None))
        every_row = self._every_row or batch.prompt_targets is not None
        chunk_batch = chunks.batch if chunks else None
        out: DecoderOutput = self._target.forward(ids, verify, positions, chunk_batch, every_row, batch.adapted)
        features = None if self._draft is None else self._draft.model.features(out)
        return TargetPass(
            replace(rows, mask_words=None),
            page_table,
            layout.with_finals(out.hidden, every_row),
            None if features is None else layout.round_rows(features),
            None if features is None else layout.chunk_rows(features),
            prompt_hidden(batch, out.hidden, shape.width),
        )

    def _verify(self, batch: StepBatch, shape: RoundShape, passed: TargetPass, logits: Tensor) -> Rounds:
        """Accept and commit the rounds' tokens, and move the accepted path's KV to the front."""
        slots, rows, page_table = self._slots, passed.rows, passed.page_table
        round_logits = logits[: batch.num_requests * shape.width]
        min_entropies = None  # measured before masks change the logits
        if self._shapes.learns_acceptance:
            min_entropies = self._sampler.min_entropies(round_logits[:: shape.width])
        sampled = self._chosen(round_logits, batch, rows)
        synthetic = self._synthetic_acceptance_length if shape.width > 1 else None
        done = accept_commit(batch.slots, rows.tree, sampled.tokens, slots.commit_tables, shape.depth, synthetic)
        self._target.commit(batch.slots, done.accepted.path, done.commit.counts)
        features = passed.round_features
        # a chain's path is its nodes in order; rows after the last accepted one are unused
        if shape.width > 1 and not shape.is_chain:
            self._target.pool.move_path(page_table, rows.length, done.accepted.path)
            features = None if features is None else features.index_select(0, done.path_rows.flatten())
        return Rounds(rows.length, page_table, sampled, done, features, min_entropies)

    def _chosen(self, logits: Tensor, batch: StepBatch, rows: RoundRows) -> Sampled:
        """Return the target's token after every node, [B, W]."""
        tree = rows.tree
        positions = rows.positions.view(tree.tokens.shape)
        if batch.needs.random or batch.needs.shaping:  # greedy choices do not depend on them
            positions = positions + 1
        if not batch.needs.shaping:
            return self._sampler.sample(logits, Rows(batch.slots, positions), batch.needs)
        # the root is already counted as output; the other nodes of a row's path are not yet
        node = torch.arange(tree.tokens.shape[1], device=tree.tokens.device)
        path = seen_columns(tree.masks, len(node)) & (node > 0)
        return self._sampler.sample(logits, Rows(batch.slots, positions, path, tree.tokens), batch.needs)

    def _first_tokens(self, batch: StepBatch, chunks: PromptChunks, logits: Tensor) -> Finals:
        """Sample the first token of each prompt that ends in this step."""
        begin_finals(self._slots, chunks)
        positions = self._slots.seq_len[chunks.final_slots].long().unsqueeze(1) + 1
        final_logits = logits[logits.shape[0] - chunks.num_finals :]
        sampled = self._sampler.sample(final_logits, Rows(chunks.final_slots, positions), batch.needs)
        ones = torch.ones_like(chunks.final_slots)
        return Finals(sampled, self._slots.commit(chunks.final_slots, sampled.tokens, ones))

    def _extend(
        self, batch: StepBatch, rounds: Rounds | None, finals: Finals | None, passed: TargetPass
    ) -> Tensor | None:
        """Extend the draft's KV to the committed tokens. Return its state after each entry's newest token, [B + F, H].

        The last layer's KV depends on a row's input only, so only the newest rows attend. Without drafting, and for
        block drafts, no row attends and the result is None.
        """
        chunks, extend, draft = batch.chunks, None, self._draft
        if draft is None:
            return None
        draft.begin(False)
        if self._backlog is not None:
            is_plain = rounds is not None and chunks is None and batch.shape == batch.next_shape == 0
            if rounds is not None and is_plain and not batch.adapted:
                self._backlog.add(batch.slots, rounds, batch.max_kv_len)
                return None
            self._backlog.write()
        draft.begin(batch.adapted)
        if rounds is not None:
            extend = self._causal_rows(batch, rounds, rounds.committed.accepted.path.shape[1], rounds.length)
        ids = joined(
            (
                rounds.committed.commit.tokens.flatten() if rounds else None,
                ids_after(chunks, finals) if chunks else None,
            )
        )
        features = joined((rounds.features if rounds else None, passed.chunk_features if chunks else None))
        prompts = chunks.batch if chunks else None
        if self._blocks or not batch.next_shape:
            draft.keep(ids, features, extend, prompts)
            return None
        hidden = draft.extend(ids, features, extend, prompts, self._newest_rows(batch, rounds))
        return batch.rows(width=1).with_finals(hidden)

    def _causal_rows(self, batch: StepBatch, rounds: Rounds, width: int, length: Tensor) -> DecodeBatch:
        """Return `width` rows of each request's accepted path, from position length [B] int32."""
        mask = self._causal[width].expand(batch.num_requests, width)
        pages = rounds.page_table, batch.max_kv_len
        return DecodeBatch(Mode.DRAFT_EXTEND, width, width, length, mask, *pages, slots=batch.slots)

    def _newest_rows(self, batch: StepBatch, rounds: Rounds | None) -> Attending | None:
        """Return the rows that attend: each request's newest token and each chunk's last row; None for all rows."""
        chunks = batch.chunks
        num_round_rows = rounds.committed.accepted.path.numel() if rounds is not None else 0
        if rounds is not None and chunks is None and num_round_rows == rounds.length.shape[0]:
            return None
        last_rows = num_round_rows + chunks.batch.last_row_indices if chunks is not None else None
        rows = joined((rounds.committed.newest if rounds is not None else None, last_rows))
        newest = None if rounds is None else self._causal_rows(batch, rounds, 1, rounds.committed.newest_position)
        return Attending(rows, newest, chunks.batch.last_rows() if chunks is not None else None)

    def _draft_next(
        self, batch: StepBatch, hidden: Tensor | None, rounds: Rounds | None, finals: Finals | None
    ) -> Tensor | None:
        """Draft trees for the entries that the plan names; the trees of the others are reset to their root. Return the
        match lengths of copied drafts, [B + F] int64; None without copied drafts."""
        entries = batch.entry_slots
        if entries.shape[0] == 0:
            return None
        self._trees.write_roots(entries, self._slots.bonus)
        shape = self._shapes[batch.next_shape]
        if batch.next_shape and self._draft is not None:
            assert isinstance(shape, TreeShape)
            page_table = self._slots.page_table[batch.draft_slots]
            guidance = self._guidance(batch, rounds, finals) if batch.needs.masked else None
            drafting = DraftBatch(batch.draft_slots, hidden, page_table, batch.max_kv_len, batch.needs, guidance)
            self._drafters[shape].draft(drafting)
        if self._suffix is None:
            return None
        if self._draft is None:
            return self._suffix.draft(batch.draft_slots, batch.max_kv_len)
        if not isinstance(shape, TreeShape) or not shape.branch:
            return torch.zeros_like(batch.draft_slots)
        return self._suffix.draft(batch.draft_slots, batch.max_kv_len, shape.model_part.width)

    def _num_copied(self, shape: RoundShape, rounds: Rounds | None, num_correct: Tensor) -> Tensor:
        """Return [B + F] int64: accepted drafts that were copied."""
        copied = torch.zeros_like(num_correct)
        if rounds is None or shape.width == 1:
            return copied
        path, first = rounds.committed.accepted.path, 1
        if isinstance(shape, TreeShape):
            first = shape.model_part.width
        copied[: path.shape[0]] = (path >= first).sum(1)
        return copied

    def _recorded(
        self, suffix: SuffixDrafts, batch: StepBatch, rounds: Rounds | None, finals: Finals | None
    ) -> Tensor | None:
        """Record the emitted tokens. Return how many of the last proposals were correct, [B + F] int64; None without
        entries."""
        round_matches = final_matches = None
        if rounds is not None:
            round_matches = suffix.record(batch.slots, rounds.length, rounds.committed.commit)
        if finals is not None:
            assert batch.chunks is not None
            suffix.record(batch.chunks.final_slots, batch.chunks.final_lengths, finals.commit)
            final_matches = torch.full_like(finals.commit.counts, -1)  # the slots' proposals belong to earlier requests
        return None if rounds is None and finals is None else joined((round_matches, final_matches))

    def _guidance(self, batch: StepBatch, rounds: Rounds | None, finals: Finals | None) -> Guidance:
        """Return the grammars' states after the newest tokens."""
        accepted = rounds.committed.accepted if rounds else None
        last = accepted.path.gather(1, accepted.num_drafts.unsqueeze(1)).squeeze(1) if accepted else None
        roots = torch.zeros_like(finals.commit.counts) if finals else None
        return Guidance(self._masks, batch.draft_slots, joined((last, roots)), self._slots.bonus[batch.draft_slots])
