"""`EagleDecoding`: one step of an engine that speculates.

verify -> accept -> commit -> draft-extend -> draft -> tree build, rotated so that the tree built by the last round is
what this one verifies (architecture, section 4). Prompt chunks ride in the same passes of target and draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.metadata import DecodeBatch, Mode, causal_mask, to_device
from speculative.acceptance import Accepted, Verdict, accept, accept_synthetic, verdict_of
from speculative.config import SpeculativeConfig
from speculative.drafter import DraftBatch, Drafter, DraftRunner
from speculative.tree import RoundRows, Tree
from workers.config import PLAIN, RoundShape
from workers.layers.forward_context import Attending
from workers.runner.decoding import PromptChunks, StepBatch, StepTensors, begin_finals
from workers.runner.model_runner import TargetRunner
from workers.runner.slot_table import Commit, SlotTable
from workers.sampling.sampler import Logprobs, Rows, Sampled, Sampler, logprobs_of


def round_shape(config: SpeculativeConfig) -> RoundShape:
    """What the scheduler reserves for a speculating round."""
    return RoundShape(
        name=f"eagle-{config.num_steps}-{config.top_k}-{config.num_draft_tokens}",
        width=config.num_draft_tokens,
        max_new_tokens=config.num_steps + 1,
        tail_tokens=max(config.num_draft_tokens, config.num_scratch_tokens, config.num_steps + 1),
    )


@dataclass(frozen=True)
class _Verified:
    """The round's requests after verification. length: [B] committed KV before it. features: [B * D, F] of the target
    on the accepted path, as deep as it can be, for the draft."""

    length: Tensor
    verdict: Verdict
    features: Tensor

    @property
    def accepted(self) -> Accepted:
        return self.verdict.accepted

    @property
    def commit(self) -> Commit:
        return self.verdict.commit


@dataclass(frozen=True)
class _Judged:
    """A step after the target's pass. verified: of its rounds; first: of the prompts that end in it; chunk_features:
    [rows, F] of its prompt chunks. page_table: [B, max_pages] int32 of its rounds."""

    verified: _Verified | None
    first: Commit | None
    page_table: Tensor
    chunk_features: Tensor
    sampled_round: Sampled | None
    sampled_first: Sampled | None


class EagleDecoding:
    """A `workers.runner.decoding.StagedStrategy`. Shape 0 decodes plainly and keeps the draft's KV warm, shape 1
    speculates."""

    def __init__(
        self, config: SpeculativeConfig, target: TargetRunner, draft: DraftRunner, slots: SlotTable, sampler: Sampler
    ) -> None:
        self._config = config
        self._target = target
        self._draft = draft
        self._slots = slots
        self._sampler = sampler
        self._drafter = Drafter(config, draft, slots, sampler)
        self._shapes = (PLAIN, round_shape(config))
        self._causal = {rows: causal_mask(1, rows, slots.device) for rows in (1, config.num_steps + 1)}
        self._every_row = draft.model.reads_last_layer  # of prompt chunks

    @property
    def shapes(self) -> Sequence[RoundShape]:
        return self._shapes

    def step(self, batch: StepBatch) -> StepTensors:
        judged = self.verify(batch)
        return self.draft(batch, judged, self.extend(batch, judged))

    def verify(self, batch: StepBatch) -> _Judged:
        """The target's pass, acceptance and commit."""
        chunks = batch.chunks
        width = self._shapes[batch.shape].width
        mask_words = None
        if width > 1 and batch.num_requests:
            backend = self._target.backends[Mode.VERIFY]
            mask_words = backend.verify_buffer(batch.num_requests, width, self._slots.device)
        rows = self._drafter.trees.read(batch.slots, width, self._slots.seq_len, mask_words)
        page_table = self._slots.page_table[batch.slots]
        hidden, features = self._run_target(batch, rows, page_table, mask_words)
        num_decode_rows = batch.slots.shape[0] * width
        logits = self._target.model.lm_head(self._emitting_rows(hidden, num_decode_rows, chunks))
        verified = first = None
        sampled_round = sampled_first = None
        if batch.num_requests:
            sampled_round = self._choose(logits[:num_decode_rows], batch, rows)
            verified = self._accept(batch, rows, sampled_round.tokens, page_table, features[:num_decode_rows])
        if chunks is not None and chunks.finals:
            begin_finals(self._slots, chunks)
            sampled_first = self._choose_first(logits[num_decode_rows:], batch, chunks)
            first = self._slots.commit(chunks.final_slots, sampled_first.tokens, torch.ones_like(chunks.final_slots))
        return _Judged(verified, first, page_table, features[num_decode_rows:], sampled_round, sampled_first)

    def _run_target(
        self, batch: StepBatch, rows: RoundRows, page_table: Tensor, mask_words: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Final hidden states and draft features of all rows of the step."""
        width = rows.tree.tokens.shape[1]
        decode = positions = None
        if batch.num_requests:
            mode = Mode.VERIFY if width > 1 else Mode.DECODE
            decode = DecodeBatch(
                mode,
                width,
                width,
                rows.length,
                rows.tree.masks,
                page_table,
                batch.max_kv_len,
                mask_words,
                chain=self._config.top_k == 1,
            )
            positions = rows.positions
        ids = rows.ids
        if batch.chunks is not None:
            ids = torch.cat((ids, batch.chunks.ids))
        out = self._target.forward(
            ids, decode, positions, batch.chunks.batch if batch.chunks else None, self._every_row
        )
        return out.hidden, self._draft.model.features(out)

    def _emitting_rows(self, hidden: Tensor, num_decode_rows: int, chunks: PromptChunks | None) -> Tensor:
        """Rows whose next token is chosen: all of the rounds', and the last of each finished prompt."""
        if chunks is None:
            return hidden
        finals = chunks.final_rows if self._every_row else chunks.final_chunks
        return torch.cat((hidden[:num_decode_rows], hidden[num_decode_rows + finals]))

    def _choose(self, logits: Tensor, batch: StepBatch, rows: RoundRows) -> Sampled:
        """The target's token behind every node: [B, W]."""
        tree = rows.tree
        positions = rows.positions.view(tree.tokens.shape)
        if batch.needs.random or batch.needs.shaping:  # else nothing depends on them
            positions = positions + 1
        if not batch.needs.shaping:
            return self._sampler.sample(logits, Rows(batch.slots, positions), batch.needs)
        # the root is already counted as output; the other nodes of a row's path are not yet
        node = torch.arange(tree.tokens.shape[1], device=tree.tokens.device)
        path = (tree.masks.unsqueeze(2) >> node & 1).bool() & (node > 0)
        return self._sampler.sample(logits, Rows(batch.slots, positions, path, tree.tokens), batch.needs)

    def _choose_first(self, logits: Tensor, batch: StepBatch, chunks: PromptChunks) -> Sampled:
        """The first token behind each finished prompt: [F, 1]."""
        positions = self._slots.seq_len[chunks.final_slots].long().unsqueeze(1) + 1
        return self._sampler.sample(logits, Rows(chunks.final_slots, positions), batch.needs)

    def _accept(
        self, batch: StepBatch, rows: RoundRows, chosen: Tensor, page_table: Tensor, features: Tensor
    ) -> _Verified:
        """Accept, commit, and move the accepted path's KV to the front of the tail."""
        slots, tree = self._slots, rows.tree
        width = tree.tokens.shape[1]
        depth = min(self._config.num_steps, width - 1)
        synthetic = self._config.synthetic_acceptance_length if width > 1 else None
        if chosen.is_cuda:
            from speculative.kernels.accept_commit import accept_commit

            verdict = accept_commit(batch.slots, tree, chosen, slots, depth, synthetic)
        else:
            accepted = self._accepted(batch.slots, tree, chosen, rows.length, depth, synthetic)
            commit = slots.commit(batch.slots, accepted.tokens, accepted.num_drafts + 1)
            verdict = verdict_of(accepted, commit, width, slots.speculative[batch.slots], rows.length)
        # a chain's path is its nodes in their order; rows behind the last accepted are read by nobody
        if self._config.top_k > 1 and width > 1:
            self._target.pool.move_path(page_table, rows.length, verdict.accepted.path)
            features = features.index_select(0, verdict.path_rows.flatten())
        return _Verified(rows.length, verdict, features)

    def _accepted(
        self, slots: Tensor, tree: Tree, chosen: Tensor, length: Tensor, depth: int, synthetic: float | None
    ) -> Accepted:
        enabled = self._slots.speculative[slots] & ~self._slots.finished[slots]
        if synthetic is None:
            return accept(tree, chosen, enabled, depth)
        return accept_synthetic(tree, chosen, enabled, depth, synthetic, self._slots.seed[slots], length.long())

    def extend(self, batch: StepBatch, judged: _Judged) -> Tensor:
        """Bring the draft's KV up to the committed tokens. [B + F, H]: its state behind the newest token of each
        request that emitted. KV needs a row's input alone, so that the newest rows alone attend."""
        chunks, verified = batch.chunks, judged.verified
        ids, features, decode = [], [], None
        if verified is not None:
            rows = verified.accepted.path.shape[1]
            features.append(verified.features)
            ids.append(verified.accepted.tokens.flatten())
            mask = self._causal[rows].expand(batch.num_requests, rows)
            decode = DecodeBatch(
                Mode.DRAFT_EXTEND, rows, rows, verified.length, mask, judged.page_table, batch.max_kv_len
            )
        if chunks is not None:
            features.append(judged.chunk_features)
            ids.append(_shifted_ids(chunks, judged.first))
        newest = self._newest(batch, judged)
        context = self._draft.context(decode, None, chunks.batch if chunks else None, newest)
        head = self._draft.model
        hidden: Tensor = head(_joined(ids), head.combine(_joined(features)), context)
        if chunks is None:
            return hidden
        return torch.cat((hidden[: batch.num_requests], hidden[batch.num_requests + chunks.final_chunks]))

    def draft(self, batch: StepBatch, judged: _Judged, hidden: Tensor) -> StepTensors:
        """The next trees of all that emitted, and what they emitted."""
        slots, page_table = batch.slots, judged.page_table
        if batch.chunks is not None:
            slots = torch.cat((batch.slots, batch.chunks.final_slots))
            page_table = self._slots.page_table[slots]
        if slots.shape[0] and batch.speculates:
            self._drafter.draft(DraftBatch(slots, hidden, page_table, batch.max_kv_len, batch.needs))
        elif slots.shape[0]:
            self._drafter.draft_nothing(slots)
        return self._result(batch, judged)

    def _newest(self, batch: StepBatch, judged: _Judged) -> Attending | None:
        """The rows of `extend` behind each request's newest token and each chunk's last; None if there are no
        others."""
        chunks, verified = batch.chunks, judged.verified
        rows, decode, num_decode_rows = [], None, 0
        if verified is not None:
            num_decode_rows = verified.accepted.tokens.numel()
            if chunks is None and num_decode_rows == batch.num_requests:
                return None
            rows.append(verified.verdict.newest)
            mask = self._causal[1].expand(batch.num_requests, 1)
            decode = DecodeBatch(
                Mode.DRAFT_EXTEND, 1, 1, verified.verdict.newest_position, mask, judged.page_table, batch.max_kv_len
            )
        if chunks is not None:
            rows.append(num_decode_rows + chunks.batch.last_row_indices)
        return Attending(_joined(rows), decode, chunks.batch.last_rows() if chunks else None)

    def _result(self, batch: StepBatch, judged: _Judged) -> StepTensors:
        verified, first = judged.verified, judged.first
        columns = verified.commit.tokens.shape[1] if verified is not None else 1
        tokens, counts, finish, accepted = [], [], [], []
        if verified is not None:
            tokens.append(verified.commit.tokens)
            counts.append(verified.commit.counts)
            finish.append(verified.commit.finish)
            accepted.append(verified.verdict.reported)
        if first is not None:
            tokens.append(F.pad(first.tokens, (0, columns - 1)))
            counts.append(first.counts)
            finish.append(first.finish)
            accepted.append(torch.full_like(first.counts, -1))
        if not tokens:
            empty = batch.slots.new_zeros(0)
            return StepTensors(empty.view(0, 1), empty, empty, empty, None)
        return StepTensors(
            _joined(tokens), _joined(counts), _joined(finish), _joined(accepted), self._logprobs(batch, judged, columns)
        )

    @staticmethod
    def _logprobs(batch: StepBatch, judged: _Judged, columns: int) -> Logprobs | None:
        """Log-probabilities along the accepted paths, and of first tokens."""
        if batch.needs.num_logprobs < 0:
            return None
        verified, first, of_round, of_first = judged.verified, judged.first, judged.sampled_round, judged.sampled_first
        logits, tokens = [], []
        if verified is not None and of_round is not None and of_round.logits is not None:
            path = verified.accepted.path
            index = path.unsqueeze(2).expand(-1, -1, of_round.logits.shape[2])
            logits.append(of_round.logits.gather(1, index))
            tokens.append(verified.commit.tokens)
        if first is not None and of_first is not None and of_first.logits is not None:
            logits.append(of_first.logits.expand(-1, columns, -1))
            tokens.append(F.pad(first.tokens, (0, columns - 1)))
        return logprobs_of(torch.cat(logits), torch.cat(tokens), batch.needs.num_logprobs) if logits else None


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The parts below each other; one alone is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _shifted_ids(chunks: PromptChunks, first: Commit | None) -> Tensor:
    """[rows] int64: the token after each chunk row, which the draft pairs with the row's feature."""
    shifted = chunks.ids.roll(-1)
    behind = to_device(torch.tensor(chunks.next_ids), shifted.device)
    if first is not None:
        behind[chunks.final_chunks] = first.tokens.squeeze(1)
    shifted[chunks.batch.last_row_indices] = behind
    return shifted
