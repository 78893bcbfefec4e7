"""One tensor-parallel rank: turns plans into batches, runs the strategy's step, turns tensors into results.

Used by the cluster's worker loop and by the local engine; knows no transport.
"""

import functools
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attention.kv_cache.pool import KVPool
from workers.distributed.tp_group import TPGroup
from workers.runner.batch import StepBatch, StepTensors
from workers.runner.chunk_tensors import chunk_columns, in_order, prompt_chunks, prompt_targets
from workers.runner.decoding import DecodingStrategy
from workers.runner.graphs.emitted import Emitted
from workers.sampling.prompt_logprobs import PromptRanking
from workers.sampling.sampler import Logprobs, SamplingNeeds
from workers.scheduling.cost_table import CostTable
from workers.scheduling.plan import (
    FINISH_NOT_FINITE,
    NOT_FINITE,
    Chunk,
    Failure,
    GraphCount,
    PromptLogprobs,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenLogprobs,
    pack_i32,
    unpack_i32,
)
from workers.slots.slot_table import SlotTable
from workers.slots.upload import upload
from workers.structured_output.slot_grammars import News, SlotGrammars

logger = logging.getLogger(__name__)


class RanksDisagreeError(RuntimeError):
    """Two ranks emitted different tokens in a step: a bug, or broken hardware. Raised in debug mode only."""


class LateCaptures(Protocol):
    """Steps that become graphs while the engine serves: `workers.runner.graphs.cuda_graph.GraphedDecoding`."""

    @property
    def graphs(self) -> GraphCount:
        """How many there are, and how many are still to come."""

    def capture_next(self, group: TPGroup) -> None:
        """Capture one of them, while no step runs."""

    def want_masked(self) -> None:
        """Steps with grammars are to be captured too."""


@dataclass(frozen=True)
class _Pending:
    plan: StepPlan
    emitted: Emitted | None  # None: nothing ran, a step was captured
    num_logprobs: tuple[int, ...]  # per entry of the result, as its request asked; its slot may have a new owner by now
    started_s: float
    failed: dict[int, Failure]  # by entry
    failed_requests: dict[int, Failure]  # by their number
    asking: tuple[int, ...] = ()  # requests whose prompt chunks ask for log-probabilities, in the order of their rows


class _SlotIds:
    """Slot numbers on the device. Most steps run the same requests as the one before, and then send nothing."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._name = name
        self._last: tuple[int, ...] = ()
        self._tensor = torch.empty(0, dtype=torch.int64, device=device)

    def columns(self, slots: tuple[int, ...]) -> dict[str, npt.NDArray[Any]]:
        """What `on_device` needs."""
        return {} if slots == self._last else {self._name: np.array(slots, np.int64)}

    def on_device(self, slots: tuple[int, ...], columns: Mapping[str, Tensor]) -> Tensor:
        """[n] int64; the same tensor as long as the slots are the same."""
        if slots != self._last:
            self._last = slots
            self._tensor = columns[self._name]
        return self._tensor


def _entries(plan: StepPlan) -> tuple[int, ...]:
    """The slots that emit tokens, in the order of the step's result."""
    return (*unpack_i32(plan.slots).tolist(), *(chunk.slot for chunk in plan.chunks if chunk.next_token < 0))


class Worker:
    """Implements `workers.runner.executor.StepExecutor`. costs: set once they are measured."""

    def __init__(
        self,
        strategy: DecodingStrategy,
        slots: SlotTable,
        group: TPGroup,
        debug: bool,
        grammars: SlotGrammars | None = None,
        captures: LateCaptures | None = None,
        pools: Sequence[KVPool] = (),
    ) -> None:
        """grammars: of the engine's slots; None of an engine whose requests have none. captures: None of an engine
        without graphs. pools: the KV of target and draft."""
        self.costs: CostTable | None = None
        self._strategy = strategy
        self._slots = slots
        self._group = group
        self._debug = debug
        self._grammars = grammars
        self._captures = captures
        self._pools = pools
        self._pending: deque[_Pending] = deque()
        self._round_slots = _SlotIds("round slots", slots.device)
        self._draft_slots = _SlotIds("draft slots", slots.device)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def graphs(self) -> GraphCount:
        return GraphCount() if self._captures is None else self._captures.graphs

    def begin_grammars(self) -> None:
        """Start the process that fills masks, so that the first request with a grammar need not wait for it."""
        if self._grammars is not None:
            self._grammars.begin()

    def ready(self) -> bool:
        if not self._pending:
            return False
        emitted = self._pending[0].emitted
        return emitted is None or emitted.is_here()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        assert len(self._pending) < 2, "a third step was submitted before a result was taken"
        started_s = time.perf_counter()
        if plan.capture:
            assert not self._pending, "a capture was asked for while a step runs"
            if self._captures is not None:
                self._captures.capture_next(self._group)
            self._pending.append(_Pending(plan, None, (), started_s, {}, {}))
            return
        if plan.grammars and self._captures is not None:
            self._captures.want_masked()
        entries = _entries(plan)
        failed, failed_requests = dict[int, Failure](), dict[int, Failure]()
        batch = self._batch(plan, entries, failed_requests)
        fill = functools.partial(self._fill_masks, plan, entries, failed) if batch.needs.masked else None
        tensors = self._strategy.step(batch, fill)
        if self._debug:
            self._assert_ranks_agree(tensors)
        num_logprobs = tuple(self._slots.facts[slot].sampling.logprobs for slot in entries)
        emitted = Emitted.of(tensors)
        if self._grammars is not None and batch.needs.masked:
            self._grammars.ran(entries, emitted)
        asking = tuple(self._slots.facts[chunk.slot].number for chunk in in_order(plan) if chunk.logprobs >= 0)
        self._pending.append(_Pending(plan, emitted, num_logprobs, started_s, failed, failed_requests, asking))

    def _fill_masks(self, plan: StepPlan, entries: tuple[int, ...], failed: dict[int, Failure]) -> None:
        """The masks of a step's rows onto the device; adds to `failed`. What has no mask emits nothing."""
        grammars = self._grammars
        assert grammars is not None, "a grammar in an engine without them"
        num_rounds, width = len(plan.slots) // 4, self._strategy.shapes[plan.shape].width
        failed |= grammars.fill(entries[:num_rounds], width, entries[num_rounds:], plan.mask_wait_ms / 1e3)
        grammars.agree(self._group, self._slots.finished)

    def take(self) -> StepResult:
        pending = self._pending.popleft()
        emitted = pending.emitted
        if emitted is None:
            elapsed_s = time.perf_counter() - pending.started_s
            return StepResult(
                pending.plan.epoch, pending.plan.step, b"", b"", b"", b"", elapsed_s=elapsed_s, graphs=self.graphs
            )
        emitted.wait()
        width = emitted.num_tokens
        rows: list[list[int]] = emitted.rows[:, : width + 3].tolist()
        counts = [row[-3] for row in rows]
        finish = bytes(row[-2] for row in rows)
        if FINISH_NOT_FINITE in finish:
            pending.failed.update((entry, NOT_FINITE) for entry, why in enumerate(finish) if why == FINISH_NOT_FINITE)
        logprobs = self._logprobs(pending, emitted.logprobs, counts)
        prompt_logprobs = () if emitted.prompt is None else self._prompt_logprobs(pending, emitted.prompt)
        news = News() if self._grammars is None else self._grammars.news()
        return StepResult(
            epoch=pending.plan.epoch,
            step=pending.plan.step,
            counts=pack_i32(counts),
            tokens=pack_i32([token for row in rows for token in row[: row[-3]]]),
            finish=finish,
            accepted=pack_i32([row[-1] for row in rows]),
            logprobs=logprobs,
            failed=pending.failed,
            masks_ready=pack_i32(news.ready),
            failed_requests=news.failed | pending.failed_requests,
            grammars_ready=pack_i32(news.compiled),
            elapsed_s=time.perf_counter() - pending.started_s,
            graphs=self.graphs,
            prompt_logprobs=prompt_logprobs,
        )

    def _batch(self, plan: StepPlan, entries: tuple[int, ...], failed: dict[int, Failure]) -> StepBatch:
        """The plan's requests enter their slots, and what it runs as tensors: one copy to the device at most, for which
        nothing waits. failed: by number, gets the requests that cannot enter as they are."""
        table, padding = self._slots, self._slots.padding_slot
        drafting = plan.drafting or bytes(len(entries))
        rounds = tuple(unpack_i32(plan.slots).tolist())
        drafts = tuple(slot if drafts else padding for slot, drafts in zip(entries, drafting, strict=True))
        plan, entering = self._entering(plan, failed)
        columns = {
            **entering,
            **self._round_slots.columns(rounds),
            **self._draft_slots.columns(drafts),
            **(chunk_columns(plan) if plan.chunks else {}),
        }
        if plan.cleared_pages:
            columns["cleared pages"] = unpack_i32(plan.cleared_pages).astype(np.int64)
        sent = upload(columns, table.device)
        if plan.cleared_pages:
            for pool in self._pools:
                pool.clear(sent["cleared pages"])
        table.enter(plan, sent)
        if self._grammars is not None:
            self._grammars.enter(plan)
        return StepBatch(
            slots=self._round_slots.on_device(rounds, sent),
            shape=plan.shape,
            next_shape=plan.next_shape,
            draft_slots=self._draft_slots.on_device(drafts, sent),
            max_kv_len=plan.max_kv_len,
            chunks=prompt_chunks(plan, sent, table.page_table) if plan.chunks else None,
            needs=SamplingNeeds.of([table.facts[slot] for slot in entries]),
            prompt_targets=prompt_targets(plan, sent),
        )

    def _entering(self, plan: StepPlan, failed: dict[int, Failure]) -> tuple[StepPlan, dict[str, npt.NDArray[Any]]]:
        """The plan, and what its requests and pages are on the device. A request whose parameters raise is added to
        `failed`, by number, and enters with none."""
        try:
            return plan, self._slots.columns(plan)
        except Exception:
            logger.exception("the requests of a plan could not enter together")
        inits = []
        for init in plan.inits:
            try:
                self._slots.columns(StepPlan(plan.epoch, plan.step, b"", 0, 0, inits=(init,)))
            except Exception as error:
                failed[init.number] = Failure(f"its parameters failed: {type(error).__name__}: {error}")
                init = msgspec.structs.replace(init, sampling=SamplingParams(init.sampling.max_tokens))
            inits.append(init)
        plan = msgspec.structs.replace(plan, inits=tuple(inits))
        return plan, self._slots.columns(plan)

    def _prompt_logprobs(self, pending: _Pending, ranking: PromptRanking) -> tuple[PromptLogprobs, ...]:
        """ranking: on the host, of the chunks that ask for it, in the order of `in_order`. What fails for one request
        is added to the step's failures, and has no numbers."""
        found, first = {}, 0
        asking = [chunk for chunk in in_order(pending.plan) if chunk.logprobs >= 0]
        for chunk, number in zip(asking, pending.asking, strict=True):
            rows = slice(first, first + chunk.num_logprobs)
            first = rows.stop
            try:
                found[chunk.slot] = _scores_of(chunk, ranking, rows)
            except Exception as error:
                logger.exception("the log-probabilities of a prompt failed")
                why = f"its prompt's log-probabilities failed: {type(error).__name__}: {error}"
                pending.failed_requests[number] = Failure(why)
                found[chunk.slot] = PromptLogprobs(chunk.start + 1, b"", b"")
        return tuple(found[chunk.slot] for chunk in pending.plan.chunks if chunk.logprobs >= 0)

    def _logprobs(
        self, pending: _Pending, tensors: Logprobs | None, counts: list[int]
    ) -> dict[int, tuple[TokenLogprobs, ...]]:
        """By entry; what fails for one request is added to the step's failures."""
        if tensors is None:
            return {}
        out = {}
        for entry, k in enumerate(pending.num_logprobs):
            if k >= 0:
                try:
                    out[entry] = _token_logprobs(tensors, entry, counts[entry], k)
                except Exception as error:
                    logger.exception("the log-probabilities of a request failed")
                    pending.failed[entry] = Failure(f"its log-probabilities failed: {type(error).__name__}: {error}")
        return out

    def _assert_ranks_agree(self, tensors: StepTensors) -> None:
        """Compare what this step emitted with the other ranks; costs a gather and a host read, so debug only."""
        mine = torch.cat((_mask_invalid(tensors), tensors.counts.unsqueeze(1), tensors.finish.unsqueeze(1)), dim=1)
        everyone = self._group.all_gather(mine)
        different = (everyone != everyone[0]).flatten(1).any(1)
        if bool(different.any()):
            raise RanksDisagreeError(f"ranks {different.nonzero().flatten().tolist()} emitted other tokens than rank 0")


def _token_logprobs(tensors: Logprobs, entry: int, count: int, k: int) -> tuple[TokenLogprobs, ...]:
    """Of an entry's `count` tokens, each with the k most likely."""
    top_ids, top = tensors.top_ids[entry, :count, :k], tensors.top[entry, :count, :k]
    chosen = tensors.chosen[entry, :count].tolist()
    return tuple(
        TokenLogprobs(own, tuple(ids), tuple(values))
        for own, ids, values in zip(chosen, top_ids.tolist(), top.tolist(), strict=True)
    )


def _scores_of(chunk: Chunk, ranking: PromptRanking, rows: slice) -> PromptLogprobs:
    """A chunk's, which are these rows of the ranking."""
    return PromptLogprobs(
        start=chunk.start + 1,
        logprobs=ranking.logprobs[rows].numpy().astype("<f4").tobytes(),
        ranks=pack_i32(ranking.ranks[rows].numpy()),
        top_ids=pack_i32(ranking.top_ids[rows, : chunk.logprobs].numpy()),
        top_logprobs=ranking.top[rows, : chunk.logprobs].numpy().astype("<f4").tobytes(),
    )


def _mask_invalid(tensors: StepTensors) -> Tensor:
    column = torch.arange(tensors.tokens.shape[1], device=tensors.tokens.device)
    return torch.where(column < tensors.counts.unsqueeze(1), tensors.tokens, -1)
