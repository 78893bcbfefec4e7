"""One tensor-parallel rank: plan -> batch (`plan_batch`) -> step (the strategy) -> `StepResult`. Used by the cluster's
worker loop and the local engine; knows no transport."""

import functools
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aerie.attention.kv_cache.pool import KVPool
from aerie.attention.recurrent.pool import StatePool
from aerie.kernels.slots.finish import FINISH_NOT_FINITE
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.runner.batch import StepTensors
from aerie.workers.runner.chunk_tensors import chunks_in_order
from aerie.workers.runner.commands import CommandHandlers
from aerie.workers.runner.decoding import DecodingStrategy
from aerie.workers.runner.graphs.host_output import HostOutput
from aerie.workers.runner.plan_batch import Adapters, PlanBatches, entries_of
from aerie.workers.sampling import Logprobs, PromptRanking
from aerie.workers.scheduling.commands.command import (
    Captured,
    CaptureGraph,
    Command,
    CommandAnswer,
    ReleasedPages,
    ReleasePages,
    RestorePages,
)
from aerie.workers.scheduling.cost_table import CostTable
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
from aerie.workers.slots import SlotTable
from aerie.workers.structured_output.slot_grammars import MaskEvents, SlotGrammars
from aerie.workers.vision.tower import VisionTower

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

    ranking: top tokens of the chunks with log-probabilities, in the order of `chunks_in_order`, on the host.
    """
    logprobs, first = {}, 0
    scored = [chunk for chunk in chunks_in_order(pending.plan) if chunk.logprobs >= 0]
    for chunk, number in zip(scored, pending.scored_requests, strict=True):
        rows = slice(first, first + chunk.num_logprobs)
        first = rows.stop
        try:
            logprobs[chunk.slot] = _scores_of(chunk, ranking, rows)
        except Exception as error:
            logger.exception("could not convert the log-probabilities of a prompt")
            why = f"its prompt's log-probabilities failed: {type(error).__name__}: {error}"
            pending.failed_requests[number] = Failure(why)
            logprobs[chunk.slot] = PromptLogprobs(chunk.start + 1, b"", b"")
    return tuple(logprobs[chunk.slot] for chunk in pending.plan.chunks if chunk.logprobs >= 0)


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


class RanksDisagreeError(RuntimeError):
    """Ranks emitted different tokens: a bug, or broken hardware. Raised only in debug mode."""


class LateCaptures(Protocol):
    """Captures graphs while the engine serves: `aerie.workers.runner.graphs.cuda_graph.GraphedDecoding`."""

    @property
    def graphs(self) -> GraphCount:
        """Number of captured and of waiting graphs."""

    def capture_next(self, group: TPGroup) -> None:
        """Capture the next waiting graph. Call it while no step runs."""

    def want_masked(self) -> None:
        """Queue the graphs of steps with grammars."""


class Worker:
    """Implements `aerie.workers.runner.executor.StepExecutor`.

    costs: set after their measurement, if any.
    handlers: carry out its commands.
    """

    def __init__(
        self,
        strategy: DecodingStrategy,
        slots: SlotTable,
        group: TPGroup,
        debug: bool,
        grammars: SlotGrammars | None = None,
        captures: LateCaptures | None = None,
        pools: Sequence[KVPool] = (),
        states: StatePool | None = None,
        tower: VisionTower | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        """grammars, pools, states, tower, adapters: as in `PlanBatches`. captures: None without graphs."""
        self.costs: CostTable | None = None
        self._strategy = strategy
        self._slots = slots
        self._group = group
        self._debug = debug
        self._grammars = grammars
        self._captures = captures
        self._pending: deque[PendingStep] = deque()
        self._last_end_s = -math.inf  # `time.perf_counter` at the end of the last step whose result was taken
        self._batches = PlanBatches(slots, grammars, pools, states, group, tower, adapters)
        self.handlers = CommandHandlers(group.rank)
        self.handlers.add(CaptureGraph, self._capture)
        self._pools = pools
        self.handlers.add(ReleasePages, self._release_pages)
        self.handlers.add(RestorePages, self._restore_pages)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def graphs(self) -> GraphCount:
        return GraphCount() if self._captures is None else self._captures.graphs

    def begin_grammars(self) -> None:
        """Start the process that fills masks, so that the first request with a grammar does not wait for it."""
        if self._grammars is not None:
            self._grammars.begin()

    def ready(self) -> bool:
        if not self._pending:
            return False
        return self._pending[0].emitted.is_here()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        """Launch a step. Its result is taken later; at most two steps may be pending."""
        assert len(self._pending) < 2, "a third step was submitted before a result was taken"
        started_s = time.perf_counter()
        if plan.grammars and self._captures is not None:
            self._captures.want_masked()
        entries = entries_of(plan)
        failed, failed_requests = dict[int, Failure](), dict[int, Failure]()
        batch = self._batches.build(plan, entries, failed_requests)
        fill = functools.partial(self._fill_masks, plan, entries, failed) if batch.needs.masked else None
        tensors = self._strategy.step(batch, fill)
        if self._debug:
            self._assert_ranks_agree(tensors)
        num_logprobs = tuple(self._slots.facts[slot].sampling.logprobs for slot in entries)
        emitted = HostOutput.of(tensors)
        if self._grammars is not None and batch.needs.masked:
            self._grammars.record_step(entries, emitted)
        scored = tuple(self._slots.facts[chunk.slot].number for chunk in chunks_in_order(plan) if chunk.logprobs >= 0)
        ended_s = time.perf_counter() if emitted.copied is None else None  # on a CPU the step has ended by now
        self._pending.append(
            PendingStep(
                plan,
                emitted,
                num_logprobs=num_logprobs,
                started_s=started_s,
                failed=failed,
                failed_requests=failed_requests,
                scored_requests=scored,
                ended_s=ended_s,
            )
        )

    def _fill_masks(self, plan: StepPlan, entries: tuple[int, ...], failed: dict[int, Failure]) -> None:
        """Copy the masks of a step's rows to the device. Rows with a late mask emit nothing. Adds to `failed`."""
        grammars = self._grammars
        assert grammars is not None, "a step has a grammar, but the engine has none"
        num_rounds, width = len(plan.slots) // 4, self._strategy.shapes[plan.shape].width
        failed |= grammars.fill(entries[:num_rounds], width, entries[num_rounds:], plan.mask_wait_ms / 1e3)
        grammars.agree(self._group, self._slots.finished)

    def take(self) -> StepResult:
        pending = self._pending.popleft()
        pending.emitted.wait()
        events = MaskEvents() if self._grammars is None else self._grammars.events(pending.emitted)
        previous_end_s = self._last_end_s
        self._last_end_s = time.perf_counter() if pending.ended_s is None else pending.ended_s
        return pending.result(events, self.graphs, self._last_end_s, previous_end_s)

    @torch.inference_mode()
    def carry_out(self, command: Command) -> tuple[CommandAnswer, ...]:
        assert not self._pending, "a command came while a step is pending"
        return (self.handlers.carry_out(command),)

    def _capture(self, work: CaptureGraph) -> Captured:
        if self._captures is not None:
            self._captures.capture_next(self._group)
        return Captured(self.graphs)

    def _release_pages(self, work: ReleasePages) -> ReleasedPages:
        """Give the memory of KV back. Raises ValueError if the pools were not built for it."""
        if not all(pool.is_releasable for pool in self._pools):
            raise ValueError(
                "the KV cache of this engine cannot be released; start it with --enable-sleep-mode "
                "(cache.releasable: true)"
            )
        return ReleasedPages(sum(pool.release() for pool in self._pools))

    def _restore_pages(self, work: RestorePages) -> ReleasedPages:
        """Take the memory of KV again. Raises ValueError if other processes have it."""
        try:
            for pool in self._pools:
                pool.restore()
        except RuntimeError as error:
            raise ValueError(f"the memory of the KV cache is not free ({error}); free it and wake up again") from error
        return ReleasedPages()

    def _assert_ranks_agree(self, tensors: StepTensors) -> None:
        """Compare the step's output over the ranks. Needs a gather and a device sync, so only in debug mode."""
        own = torch.cat((_mask_invalid(tensors), tensors.counts.unsqueeze(1), tensors.finish.unsqueeze(1)), dim=1)
        rank_reports = self._group.all_gather(own)
        different = (rank_reports != rank_reports[0]).flatten(1).any(1)
        if bool(different.any()):
            raise RanksDisagreeError(f"ranks {different.nonzero().flatten().tolist()} emitted other tokens than rank 0")


def _mask_invalid(tensors: StepTensors) -> Tensor:
    column = torch.arange(tensors.tokens.shape[1], device=tensors.tokens.device)
    return torch.where(column < tensors.counts.unsqueeze(1), tensors.tokens, -1)
