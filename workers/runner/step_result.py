"""Converts a step's output to a `StepResult`. Used by `aerie.workers.runner.worker`."""

import logging
from dataclasses import dataclass

from aerie.kernels.slots.finish import FINISH_NOT_FINITE
from aerie.workers.runner.chunk_tensors import in_order
from aerie.workers.runner.graphs.host_output import HostOutput
from aerie.workers.sampling.prompt_logprobs import PromptRanking
from aerie.workers.sampling.sampler import Logprobs
from aerie.workers.scheduling.plan import (
    NOT_FINITE,
    Chunk,
    Failure,
    GraphCount,
    PromptLogprobs,
    StepPlan,
    StepResult,
    TokenLogprobs,
    pack_i32,
)
from aerie.workers.structured_output.slot_grammars import MaskEvents

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PendingStep:
    """A submitted step whose result has not been taken.

    num_logprobs: `SamplingParams.logprobs` of each entry, stored because the slot may have a new request by now.
    started_s: `time.perf_counter` at the submission.
    ended_s: `time.perf_counter` at the end; None if the device may still run the step.
    failed: failures by entry.
    failed_requests: failures by request number.
    scored_requests: numbers of the requests with log-probabilities of prompt chunks, in the order of their rows.
    """

    plan: StepPlan
    emitted: HostOutput
    num_logprobs: tuple[int, ...]
    started_s: float
    failed: dict[int, Failure]
    failed_requests: dict[int, Failure]
    scored_requests: tuple[int, ...] = ()
    ended_s: float | None = None

    def result(self, events: MaskEvents, graphs: GraphCount, ended_s: float, previous_end_s: float) -> StepResult:
        """Return the result. The output must be on the host.

        events: events of grammars.
        graphs: graph counts after this step.
        ended_s, previous_end_s: `time.perf_counter` at the end of this step and of the previous one.
        """
        plan, emitted = self.plan, self.emitted
        elapsed_s, took_s = ended_s - self.started_s, ended_s - max(self.started_s, previous_end_s)
        tokens, matches, min_entropies = emitted.columns
        rows: list[list[int]] = tokens.tolist()
        counts = [row[-3] for row in rows]
        finish = bytes(row[-2] for row in rows)
        if FINISH_NOT_FINITE in finish:
            self.failed.update((entry, NOT_FINITE) for entry, why in enumerate(finish) if why == FINISH_NOT_FINITE)
        logprobs = _logprobs(self, emitted.logprobs, counts)
        prompt_logprobs = () if emitted.prompt is None else _prompt_logprobs(self, emitted.prompt)
        return StepResult(
            epoch=plan.epoch,
            step=plan.step,
            counts=pack_i32(counts),
            tokens=pack_i32([token for row in rows for token in row[: row[-3]]]),
            finish=finish,
            accepted=pack_i32([row[-1] for row in rows]),
            logprobs=logprobs,
            failed=self.failed,
            masks_ready=pack_i32(events.ready),
            failed_requests=events.failed | self.failed_requests,
            grammars_ready=pack_i32(events.compiled),
            elapsed_s=elapsed_s,
            took_s=took_s,
            graphs=graphs,
            prompt_logprobs=prompt_logprobs,
            matches=pack_i32(matches) if emitted.num_matches else b"",
            min_entropies=pack_i32(min_entropies) if emitted.num_entropies else b"",
        )


def _prompt_logprobs(pending: PendingStep, ranking: PromptRanking) -> tuple[PromptLogprobs, ...]:
    """Return log-probabilities of prompt chunks. A request whose conversion fails is added to the step's failures.

    ranking: of the chunks with log-probabilities, in the order of `in_order`, on the host.
    """
    found, first = {}, 0
    scored = [chunk for chunk in in_order(pending.plan) if chunk.logprobs >= 0]
    for chunk, number in zip(scored, pending.scored_requests, strict=True):
        rows = slice(first, first + chunk.num_logprobs)
        first = rows.stop
        try:
            found[chunk.slot] = _scores_of(chunk, ranking, rows)
        except Exception as error:
            logger.exception("could not convert the log-probabilities of a prompt")
            why = f"its prompt's log-probabilities failed: {type(error).__name__}: {error}"
            pending.failed_requests[number] = Failure(why)
            found[chunk.slot] = PromptLogprobs(chunk.start + 1, b"", b"")
    return tuple(found[chunk.slot] for chunk in pending.plan.chunks if chunk.logprobs >= 0)


def _logprobs(
    pending: PendingStep, tensors: Logprobs | None, counts: list[int]
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """Return log-probabilities by entry. A request whose conversion fails is added to the step's failures."""
    if tensors is None:
        return {}
    out = {}
    for entry, k in enumerate(pending.num_logprobs):
        if k >= 0:
            try:
                out[entry] = _token_logprobs(tensors, entry, counts[entry], k)
            except Exception as error:
                logger.exception("could not convert the log-probabilities of a request")
                pending.failed[entry] = Failure(f"its log-probabilities failed: {type(error).__name__}: {error}")
    return out


def _token_logprobs(tensors: Logprobs, entry: int, count: int, k: int) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of an entry's first `count` tokens, each with the k most likely tokens."""
    top_ids, top = tensors.top_ids[entry, :count, :k], tensors.top[entry, :count, :k]
    chosen = tensors.chosen[entry, :count].tolist()
    return tuple(
        TokenLogprobs(own, tuple(ids), tuple(values))
        for own, ids, values in zip(chosen, top_ids.tolist(), top.tolist(), strict=True)
    )


def _scores_of(chunk: Chunk, ranking: PromptRanking, rows: slice) -> PromptLogprobs:
    """Return a chunk's log-probabilities. rows: rows of `ranking` that belong to the chunk."""
    return PromptLogprobs(
        start=chunk.start + 1,
        logprobs=ranking.logprobs[rows].numpy().astype("<f4").tobytes(),
        ranks=pack_i32(ranking.ranks[rows].numpy()),
        top_ids=pack_i32(ranking.top_ids[rows, : chunk.logprobs].numpy()),
        top_logprobs=ranking.top[rows, : chunk.logprobs].numpy().astype("<f4").tobytes(),
    )
