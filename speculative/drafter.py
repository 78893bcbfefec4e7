"""The draft's own steps: from the recurrent state behind the newest token to a tree of guesses.

Step s writes its KV behind the committed ones, at columns (s - 1) * top_k onwards of the tail; nothing of it outlives
the round. A random request's scores carry the target's own noise (`workers.sampler`), so that the draft proposes what
the target would draw.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attention.metadata import Mode, TailBatch
from speculative.config import SpeculativeConfig
from speculative.heads import DraftHead
from speculative.tree import Candidates, Tree, best_tree, chain
from workers.model_runner import ModelRunner
from workers.sampler import Rows, Sampler, SamplingNeeds
from workers.slots import SlotTable


class DraftRunner(ModelRunner[DraftHead]):
    """The head with its own pool; page ids are the target's."""


@dataclass(frozen=True)
class _Level:
    """The expanded nodes of one depth: tokens, scores, candidate index, mask of tail columns, all [B, k]; hidden
    [B, k, H]: the state that each token was drafted from."""

    tokens: Tensor
    scores: Tensor
    candidate: Tensor
    mask: Tensor
    hidden: Tensor


class Drafter:
    """Drafts trees of one shape for the slots it is given."""

    def __init__(self, config: SpeculativeConfig, runner: DraftRunner, slots: SlotTable, sampler: Sampler) -> None:
        self._config = config
        self._runner = runner
        self._slots = slots
        self._sampler = sampler
        shard = runner.model.lm_head.shard
        own = torch.arange(shard.first, shard.first + shard.size, device=slots.device)
        self._noise_ids = runner.model.to_target(own.clamp_max(shard.vocab_size - 1))
        self._bit = torch.ones((), dtype=torch.int64, device=slots.device) << torch.arange(63, device=slots.device)

    def draft(self, slots: Tensor, hidden: Tensor, max_kv_len: int, needs: SamplingNeeds) -> Tree:
        """Trees for slots [B] int64 whose newest token is committed; hidden [B, H]: the recurrent state behind it."""
        if self._config.top_k == 1:
            return self._draft_chain(slots, hidden, max_kv_len, needs)
        return self._draft_tree(slots, hidden, max_kv_len, needs)

    def _draft_chain(self, slots: Tensor, hidden: Tensor, max_kv_len: int, needs: SamplingNeeds) -> Tree:
        length, page_table = self._slots.seq_len[slots], self._slots.page_table[slots]
        head, steps = self._runner.model, self._config.num_steps
        tokens: list[Tensor] = []
        for step in range(1, steps + 1):
            position = length.long().unsqueeze(1) + step
            logits = self._scores(hidden, Rows(slots, position), needs)
            tokens.append(head.to_target(head.lm_head.shard.argmax(logits)))
            if step < steps:
                mask = (self._bit[step] - 1).expand(slots.shape[0], 1)
                batch = TailBatch(Mode.DRAFT_DECODE, 1, step, length, mask, page_table, max_kv_len)
                hidden = head(tokens[-1], hidden, self._runner.context(batch))
        return chain(self._slots.bonus[slots], torch.stack(tokens, dim=1))

    def _draft_tree(self, slots: Tensor, hidden: Tensor, max_kv_len: int, needs: SamplingNeeds) -> Tree:
        length, page_table = self._slots.seq_len[slots], self._slots.page_table[slots]
        batch, k, steps = slots.shape[0], self._config.top_k, self._config.num_steps
        position = length.long().unsqueeze(1)
        scores, tokens = self._best(hidden, Rows(slots, position + 1), needs)
        found = [Candidates(tokens, scores, torch.full_like(tokens, -1), tokens.new_ones(k), 1)]
        level = _Level(tokens, scores, torch.arange(k, device=slots.device).expand(batch, k),
                       self._bit[:k].expand(batch, k), hidden.unsqueeze(1).expand(batch, k, -1))
        for step in range(1, steps):
            tail = TailBatch(Mode.DRAFT_DECODE, k, step * k, length, level.mask, page_table, max_kv_len)
            rope_positions = (position + step - 1).expand(batch, k).flatten()
            context = self._runner.context(tail, rope_positions)
            # contiguous: a head may add to the state in place, and the first level's is one row seen k times
            hidden = level.hidden.flatten(0, 1).contiguous()
            state = self._runner.model(level.tokens.flatten(), hidden, context)
            rows = Rows(slots, (position + step + 1).expand(batch, k))
            child_scores, child_tokens = self._best(state, rows, needs)
            child_scores = (child_scores.view(batch, k, k) + level.scores.unsqueeze(2)).flatten(1)
            child_tokens = child_tokens.view(batch, k * k)
            parents = level.candidate.repeat_interleave(k, dim=1)
            found.append(Candidates(child_tokens, child_scores, parents, tokens.new_full((k * k,), step + 1), step + 1))
            level = self._expand(found, level, state.view(batch, k, -1), step)
        return best_tree(self._slots.bonus[slots], _concatenate(found), self._config.num_draft_tokens)

    def _expand(self, found: list[Candidates], level: _Level, state: Tensor, step: int) -> _Level:
        """The k best of the k * k children drafted last."""
        k, children = self._config.top_k, found[-1]
        first_candidate = k + (step - 1) * k * k
        scores, chosen = children.scores.topk(k, dim=1)
        parent = chosen // k
        return _Level(
            tokens=children.tokens.gather(1, chosen),
            scores=scores,
            candidate=chosen + first_candidate,
            mask=level.mask.gather(1, parent) | self._bit[step * k : step * k + k],
            hidden=state.gather(1, parent.unsqueeze(2).expand(-1, -1, state.shape[2])),
        )

    def _scores(self, hidden: Tensor, rows: Rows, needs: SamplingNeeds) -> Tensor:
        """[rows, shard size] logits, with the target's noise where requests are random."""
        logits = self._runner.model.logits(hidden)
        return self._sampler.perturb(logits, rows, self._noise_ids) if needs.random else logits

    def _best(self, hidden: Tensor, rows: Rows, needs: SamplingNeeds) -> tuple[Tensor, Tensor]:
        """The top_k log-probabilities [rows, k] and target token ids [rows, k] behind hidden [rows, H]."""
        head = self._runner.model
        scores, ids = head.lm_head.shard.topk_log_softmax(self._scores(hidden, rows, needs), self._config.top_k)
        return scores, head.to_target(ids)


def _concatenate(found: list[Candidates]) -> Candidates:
    return Candidates(
        tokens=torch.cat([c.tokens for c in found], dim=1),
        scores=torch.cat([c.scores for c in found], dim=1),
        parents=torch.cat([c.parents for c in found], dim=1),
        depths=torch.cat([c.depths for c in found]),
        max_depth=found[-1].max_depth,
    )
