"""Applies a step's result: updates requests, lengths, pages and statistics, and reports to `StepTime`, `ShapeChoice`
and `Admission`."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from aerie.kernels.slots.finish import FINISH_LENGTH, FINISH_NONE, FINISH_NOT_FINITE, FINISH_STOP
from aerie.workers.config import RoundShapes
from aerie.workers.scheduling.adapters import Adapter
from aerie.workers.scheduling.plan import Failure, StepResult, unpack_i32
from aerie.workers.scheduling.queues.admission import Admission
from aerie.workers.scheduling.queues.request_queues import RequestQueues
from aerie.workers.scheduling.request import FinishReason, RequestOutput
from aerie.workers.scheduling.sequence import InFlightStep, Sequence
from aerie.workers.scheduling.shapes.shape_choice import ShapeChoice
from aerie.workers.scheduling.stats import SchedulerStats
from aerie.workers.scheduling.step_time import StepTime

TOO_LATE = Failure("its grammar's next mask was not there in time")
NOT_ENTERED = Failure("its parameters failed on another rank")
_FINISH = {FINISH_STOP: FinishReason.STOP, FINISH_LENGTH: FinishReason.LENGTH}


class StepResults:
    """Applies results in the order of their plans. step_time: receives the times of steps; None without costs."""

    def __init__(
        self,
        queues: RequestQueues,
        stats: SchedulerStats,
        shape_choice: ShapeChoice,
        shapes: RoundShapes,
        admission: Admission,
        clock: Callable[[], float],
    ) -> None:
        self._queues = queues
        self._slot_pages = queues.slot_pages
        self._stats = stats
        self._shape_choice = shape_choice
        self._shapes = shapes
        self._admission = admission
        self._num_drafts = np.array([shape.width - 1 for shape in shapes.shapes])
        self._clock = clock
        self.step_time: StepTime | None = None

    def apply(self, step: InFlightStep, result: StepResult, newest: int) -> list[RequestOutput]:
        """Apply the result of `step`. Return an output for each request that changed. newest: number of the last
        plan."""
        counts = unpack_i32(result.counts)
        finish = np.frombuffer(result.finish, np.uint8)
        assert len(counts) == len(finish) == len(step.sequences), "a result has other entries than its plan"
        now = self._clock()
        outputs = self._end_failed(step, result, now)
        all_ran = bool(counts.all())
        seen, learnt = counts, unpack_i32(result.accepted)
        if not all_ran:
            late = self._preempt_late(step, counts, newest, now, outputs)
            seen, learnt = np.where(late, 0, counts), np.where(late, -1, learnt)
        self._take_masks(result)
        committed_before = self._advance(step, counts, now)
        if result.matches and self._shapes.model_free:
            self._record_matches(step, seen, unpack_i32(result.matches).reshape(-1, 3))
        num_drafted = self._record_acceptance(step, learnt, result.min_entropies)
        if self.step_time is not None and not step.is_change:
            expected_ms = step.expected.ms if step.expected is not None and step.num_rounds else 0.0
            self.step_time.observe(step.load, result.took_s * 1e3, expected_ms)
        outputs += _prompt_outputs(step, result) if step.with_prompt_logprobs else []
        outputs += self._take_tokens(step, result, num_drafted, committed_before, now)
        if self._shapes.model_free:  # count only verified drafts, because without a match nothing is copied
            self._stats.num_draft_tokens += sum(num_drafted)
        else:
            self._stats.num_draft_tokens += int((step.num_drafted if all_ran else step.num_drafted[counts > 0]).sum())
        self._count(result, step)
        return outputs

    def _take_tokens(
        self, step: InFlightStep, result: StepResult, num_drafted: list[int], committed_before: list[int], now: float
    ) -> list[RequestOutput]:
        """Add the tokens to their requests, and end those that the ranks have finished. Return an output for each
        request with tokens.

        num_drafted, committed_before: see `_record_acceptance` and `_advance`.
        """
        outputs = []
        counts, finish = unpack_i32(result.counts).tolist(), np.frombuffer(result.finish, np.uint8).tolist()
        start, num_rounds, logprobs = 0, step.num_rounds, result.logprobs
        tokens, accepted = unpack_i32(result.tokens).tolist(), unpack_i32(result.accepted).tolist()
        entries = zip(step.sequences, counts, finish, accepted, num_drafted, strict=True)
        awaits_tokens = self._queues.awaits_tokens
        for index, (sequence, count, finish_code, num_accepted, num_drafts) in enumerate(entries):
            new = tokens[start : start + count]
            start += count
            if count == 0 or sequence.is_finished:
                continue
            request = sequence.request
            request.output += new
            sequence.tenant.charge(count)
            if awaits_tokens:
                self._queues.record_new_tokens(sequence)
            if num_accepted >= 0:
                request.acceptance_histogram[num_accepted] += 1
                request.num_draft_tokens += num_drafts
                if sequence.adapter is not None:
                    self._judge(sequence.adapter, num_accepted)
            reason, pages = None, tuple[int, ...]()
            if index >= num_rounds:
                self._prompt_ended(sequence, now)
            if finish_code != FINISH_NONE:
                reason = _FINISH[finish_code]
                if request.sampling.routed_experts and sequence.slot >= 0:
                    pages = tuple(self._slot_pages.pages[sequence.slot])  # before they are released
                self._admission.expected.record_answer(len(request.output), reason is FinishReason.STOP)
                self._queues.finish(sequence, reason, committed_before[index], now)
            drafted = min(num_accepted, count) if num_accepted > 0 else 0  # fewer if a stop ended the round
            outputs.append(
                RequestOutput(
                    request,
                    new,
                    logprobs.get(index) if logprobs else None,
                    reason,
                    num_drafted=drafted,
                    pages=pages,
                )
            )
        return outputs

    def _judge(self, adapter: Adapter, num_accepted: int) -> None:
        """Count a round of an adapter's draft, which stops drafting if it is of no use."""
        adapter.draft.count(num_accepted)
        if self._shapes.learns_acceptance and adapter.draft.judge():
            self._queues.stop_drafting(adapter)

    def _end_failed(self, step: InFlightStep, result: StepResult, now: float) -> list[RequestOutput]:
        """End requests that failed, with or without a slot. Return their outputs."""
        queues, failed = self._queues, [(step.sequences[entry], why) for entry, why in result.failed.items()]
        others = result.failed_requests | dict.fromkeys(queues.grammars.overdue(now), TOO_LATE)
        for number, why in others.items():
            if (sequence := queues.find_number(number)) is not None:
                failed.append((sequence, why))
        if FINISH_NOT_FINITE in result.finish:
            for entry, finish in enumerate(result.finish):
                if finish == FINISH_NOT_FINITE:
                    sequence = step.sequences[entry]
                    salt = self._slot_pages.salt(sequence.slot, sequence.salt)
                    self._slot_pages.drop_nan_pages(sequence.slot, sequence.known_tokens(), salt)
        outputs = []
        for sequence, why in failed:
            if not sequence.is_finished:
                outputs.append(self._fail(sequence, why, now))
        return outputs

    def _fail(self, sequence: Sequence, why: Failure, now: float) -> RequestOutput:
        reason = FinishReason.INVALID if why.is_invalid else FinishReason.ERROR
        self._queues.finish(sequence, reason, 0, now)
        return RequestOutput(sequence.request, [], finish_reason=reason, error=why.message)

    def _preempt_late(
        self,
        step: InFlightStep,
        counts: npt.NDArray[np.int32],
        newest: int,
        now: float,
        outputs: list[RequestOutput],
    ) -> npt.NDArray[np.bool_]:
        """Preempt requests whose masks are late; they resume once the ranks report the masks. End requests without a
        grammar, which failed to enter on another rank, and add to `outputs`. Return [n]: True for the entries of
        both."""
        queues = self._queues
        late: npt.NDArray[np.bool_] = (counts == 0) & (self._slot_pages.number[step.slots] == step.numbers)
        for entry in np.flatnonzero(late).tolist():
            sequence = step.sequences[entry]
            if sequence.request.sampling.grammar is None:
                outputs.append(self._fail(sequence, NOT_ENTERED, now))
                continue
            queues.grammars.record_late_mask(sequence, now)
            queues.preempt(sequence, newest)
            self._stats.num_late_masks += 1
        return late

    def _take_masks(self, result: StepResult) -> None:
        """Resume requests whose masks are ready."""
        for number in unpack_i32(result.masks_ready).tolist() if result.masks_ready else ():
            if self._queues.find_number(number) is not None:
                self._queues.grammars.record_mask(number)

    def _prompt_ended(self, sequence: Sequence, now: float) -> None:
        """Record the first token after a prompt, and insert the prompt into the prefix cache."""
        if sequence.first_token_s < 0:
            sequence.first_token_s, sequence.first_output = now, len(sequence.request.output)
            self._stats.time_to_first_token_s.observe(now - sequence.submitted_s)
        if sequence.slot >= 0:
            self._slot_pages.share(sequence.slot, sequence.known_tokens())

    def _advance(self, step: InFlightStep, counts: npt.NDArray[np.int32], now: float) -> list[int]:
        """Update lengths by a result. Return each entry's committed length before it; a request that ends in this step
        is cached up to there."""
        slot_pages, slots, num_rounds = self._slot_pages, step.slots, step.num_rounds
        before: list[int] = slot_pages.committed[slots].tolist()
        emitted = counts
        live = slot_pages.number[slots] == step.numbers
        if not live.all():
            slots, emitted = slots[live], counts[live]
            num_rounds = int(np.count_nonzero(live[:num_rounds]))
        if len(slots) == 0:
            return before
        assert emitted.min() > 0, "a request that has not ended got no token"
        rounds, emitted_by_round = slots[:num_rounds], emitted[:num_rounds]
        assert num_rounds == 0 or emitted_by_round.max() <= step.max_new_tokens, "more tokens than the round has"
        slot_pages.num_tokens[slots] += emitted
        slot_pages.min_pending[slots] -= 1
        if slot_pages.saves is not None:
            slot_pages.saves.folded[rounds] = slot_pages.committed[rounds]
        slot_pages.committed[rounds] += emitted_by_round  # a prompt's KV was counted when its chunks were planned
        slot_pages.max_pending[rounds] -= step.max_new_tokens
        self._stats.inter_token_s.observe_all(now - slot_pages.last_token_s[rounds])
        slot_pages.take_tokens(rounds, slots[num_rounds:], now)
        return before

    def _record_acceptance(
        self, step: InFlightStep, accepted: npt.NDArray[np.int32], min_entropies: bytes
    ) -> list[int]:
        """Report accepted drafts to the shape choice. Return the number of drafts that each entry verified.

        accepted: [entries] accepted drafts; -1: the entry verified none.
        min_entropies: int32 thousandths of a nat for each round, if the target computed them.
        """
        count = step.num_rounds
        if step.shape == 0 and not min_entropies:
            return [0] * len(accepted)
        round_accepted = accepted[:count]
        if self._shape_choice.learns_from_step(step.shape, bool(min_entropies)):
            slots, numbers = step.slots[:count], step.numbers[:count]
            live = self._slot_pages.number[slots] == numbers
            nats = np.where(live, unpack_i32(min_entropies)[:count] * 1e-3, np.nan) if min_entropies else None
            reported = np.where(live, round_accepted, -1)
            self._shape_choice.acceptance.record(step.shape, slots, numbers, step.drafted, reported, nats)
        slot_counts = self._num_drafts[step.shape if self._shapes.model_free else step.drafted]
        num_drafted: list[int] = np.where(round_accepted >= 0, slot_counts, 0).tolist()
        return num_drafted + [0] * (len(accepted) - count)

    def _record_matches(
        self, step: InFlightStep, counts: npt.NDArray[np.int32], matches: npt.NDArray[np.int32]
    ) -> None:
        """Report to the shape choice how many tokens of each copied draft were right, and the length of each request's
        next match, by which it predicts the next draft.

        counts: [n] emitted tokens of each entry; entries with 0 are not reported.
        matches: [n, 3], see `StepTensors.matches`.
        """
        slots, classes = step.slots, np.full(len(step.sequences), -1, np.int64)  # -1: no draft, as after a prompt
        if step.match_classes is not None:
            classes[: step.num_rounds] = np.where(step.drafted > 0, step.match_classes, -1)
        live = (self._slot_pages.number[slots] == step.numbers) & (counts > 0) & self._slot_pages.speculative[slots]
        self._shape_choice.acceptance.record_matches(
            slots[live], step.numbers[live], classes[live], counts[live], matches[live]
        )

    def _count(self, result: StepResult, step: InFlightStep) -> None:
        """Add a finished step to the statistics."""
        stats = self._stats
        stats.num_steps += 1
        if step.num_rounds:
            num_tokens = int(unpack_i32(result.counts)[: step.num_rounds].sum())
            stats.count_rounds(self._shapes[step.shape].name, num_tokens, step.reason)
            self._admission.expected.record_step(step.load, num_tokens)
            stats.expected_tokens_per_ms = self._shape_choice.expected
        num_generated = len(result.tokens) // 4
        stats.generation_tokens += num_generated
        stats.iteration_tokens.observe(step.load.chunk_tokens + num_generated)
        stats.step_s.observe(result.elapsed_s)
        accepted = unpack_i32(result.accepted)
        num_copied = int(unpack_i32(result.matches).reshape(-1, 3)[accepted >= 0, 2].sum()) if result.matches else 0
        stats.count_accepted(self._shapes.drafted_by, int(accepted[accepted > 0].sum()), num_copied)
        for num_accepted, count in enumerate(np.bincount(accepted[accepted >= 0]).tolist()):
            stats.accepted_histogram[num_accepted] += count


def _prompt_outputs(step: InFlightStep, result: StepResult) -> list[RequestOutput]:
    """Return outputs with log-probabilities of prompts, for requests that still have a slot."""
    return [
        RequestOutput(sequence.request, [], prompt_logprobs=logprobs)
        for sequence, logprobs in zip(step.with_prompt_logprobs, result.prompt_logprobs, strict=True)
        if not sequence.is_finished and sequence.slot >= 0
    ]
