"""Tracks the requests with a grammar on one rank, with their masks and draft guides, and decides when requests with
late masks are scheduled again. Used by `aerie.workers.runner.worker`.

Each rank has a process that tracks the grammars (`aerie.workers.structured_output.mask_process.mask_host`). All ranks
emit the same tokens, so all processes compute the same masks and guides. A step's masks are filled while the target
runs, after the previous step's tokens have been copied to the host. A mask may be late only on some ranks; `agree`
makes all ranks hold the same requests.
"""

import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from aerie.kernels.drafting.guides import NOWHERE
from aerie.kernels.sampling.penalties import FREE
from aerie.kernels.slots.finish import FINISH_NONE
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.scheduling.plan import Failure, Grammar, StepPlan, pack_i32, unpack_i32
from aerie.workers.structured_output.host_link import HostLink
from aerie.workers.structured_output.mask_messages import LATE, Advanced, Entered, Fill, Filled, Order
from aerie.workers.structured_output.mask_table import HELD, MaskTable

FIRST_RETRY_S = 0.02  # delay before a held request is scheduled again; doubled each time
MAX_RETRY_S = 0.64  # maximum delay between two attempts


class HostOutput(Protocol):
    """The tokens that a step emitted and drafted, on the host or being copied to it."""

    def wait(self) -> None:
        """Wait until the copy to the host is complete."""

    @property
    def tokens(self) -> Tensor:
        """[entries, max_tokens] int64, emitted tokens."""

    @property
    def counts(self) -> Tensor:
        """[entries] int64, number of emitted tokens."""

    @property
    def finish(self) -> Tensor:
        """[entries] int64, FINISH_*."""

    @property
    def drafts(self) -> Tensor | None:
        """[entries, 2, width] int64, tokens and parents of the tree to verify next; None without a draft."""


@dataclass(eq=False)
class GrammarRequest:
    """A request with a grammar, from its admission to a slot until it ends or is admitted again.

    number: the scheduler's number of the request.
    output: emitted tokens.
    is_over: whether its last token was emitted.
    is_held: whether a mask was late; then the request emits nothing more in this slot.
    is_gone: whether the request was ended, failed or admitted again; then its tokens are no longer followed.
    """

    number: int
    grammar: Grammar
    output: list[int]
    is_over: bool = False
    is_held: bool = False
    is_gone: bool = False


class HeldRequests:
    """Decides when to schedule late requests again whose masks this rank's process will not report:

    - Requests that another rank held: they had their masks on this rank, but emitted nothing. The scheduler gets
      reports only from rank 0, whose process has nothing to report. `take` finds them.
    - Requests of a step that this rank's process did not answer in time (`add`).

    The delay doubles each time, because the process may take long.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[HostOutput, list[tuple[int, GrammarRequest]]]] = deque()  # results not taken yet
        self._num_held: dict[int, int] = {}  # consecutive times, by request
        self._retries: list[tuple[float, int]] = []  # due time and request

    def add_step(self, emitted: HostOutput, entries: Sequence[tuple[int, GrammarRequest]]) -> None:
        """Record a launched step. entries: the step's requests with a grammar, by index in the step."""
        self._steps.append((emitted, [(i, request) for i, request in entries if not request.is_held]))

    def take(self, emitted: HostOutput) -> None:
        """Find held requests in a step's result, which is on the host."""
        if not self._steps or self._steps[0][0] is not emitted:
            return
        _, entries = self._steps.popleft()
        counts = emitted.counts.tolist() if entries else []
        for i, request in entries:
            if counts[i]:
                self._num_held.pop(request.number, None)
            elif not (request.is_held or request.is_over or request.is_gone):
                self.add(request)

    def add(self, request: GrammarRequest) -> None:
        """Hold a request, and schedule it again after a delay."""
        request.is_held = True
        times = self._num_held.get(request.number, 0)
        self._num_held[request.number] = times + 1
        delay_s = min(MAX_RETRY_S, FIRST_RETRY_S * 2**times)
        self._retries.append((time.monotonic() + delay_s, request.number))

    def due(self) -> list[int]:
        """Return and forget the requests whose delay is over."""
        now_s = time.monotonic()
        due = [number for due_s, number in self._retries if due_s <= now_s]
        self._retries = [retry for retry in self._retries if retry[0] > now_s]
        return due

    def forget(self, number: int) -> None:
        """Forget a request that has ended."""
        self._num_held.pop(number, None)


MAX_GUIDED_NODES = 256  # per step; each takes about 20 us on the host, while the target runs
MIN_GUIDED_NODES = 4  # per tree
MAX_CRASHES = 2  # crashes of the mask process while it fills masks of one request


@dataclass
class MaskEvents:
    """Reports of the mask process since the last step.

    ready: late requests whose masks are filled now.
    failed: late requests whose masks cannot be filled.
    compiled: numbers of compiled grammars.
    """

    ready: list[int] = field(default_factory=list)
    failed: dict[int, Failure] = field(default_factory=dict)
    compiled: list[int] = field(default_factory=list)


class SlotGrammars:
    """The grammars of an engine's slots on one rank.

    folder: the model's folder; its tokenizer is read with the first grammar.
    tolerates_violations: whether a violated grammar is restarted, for synthetic acceptance, which ignores masks.
    fill_s, num_fills: seconds that steps waited for masks, and the number of these steps.
    work_s: seconds that the process worked for them.
    num_forced: accepted drafts within forced texts.
    """

    def __init__(self, folder: str, vocab_size: int, masks: MaskTable, tolerates_violations: bool = False) -> None:
        self.masks = masks
        self.fill_s = 0.0
        self.work_s = 0.0
        self.num_fills = 0
        self.num_forced = 0
        self._tolerates_violations = tolerates_violations
        self._link = HostLink(folder, vocab_size, masks)
        self._generation = 0
        self._by_slot: dict[int, GrammarRequest] = {}
        self._requests: dict[int, GrammarRequest] = {}  # by number, including preempted requests
        self._unread: list[tuple[HostOutput, list[tuple[int, GrammarRequest]]]] = []
        self._prepared: dict[int, Grammar] = {}  # not compiled yet
        self._num_announced = 0
        self._crashes: dict[int, int] = {}
        self._events = MaskEvents()
        self._held = HeldRequests()

    def begin(self) -> None:
        """Start the process, so that the first grammar need not wait for it."""
        self._link.begin()

    def enter(self, plan: StepPlan) -> None:
        """Add a plan's requests and grammars, and forget requests that have ended."""
        dropped = unpack_i32(plan.ended).tolist()
        prepared = dict(enumerate(plan.grammars, self._num_announced))
        self._num_announced += len(prepared)
        self._prepared |= prepared
        entered = []
        for number in dropped:
            self._forget(number)
            self._crashes.pop(number, None)
            self._held.forget(number)
        for init in plan.inits:
            self._by_slot.pop(init.slot, None)
            grammar = init.sampling.grammar
            if grammar is not None:
                self._forget(init.number)
                request = GrammarRequest(init.number, grammar, unpack_i32(init.output).tolist())
                self._by_slot[init.slot] = self._requests[init.number] = request
                entered.append(self._entered(request))
        if not (dropped or prepared or entered) or not self._connect():
            return
        self._link.send(Order(0, prepared, tuple(dropped), tuple(entered)))

    def events(self, taken: HostOutput) -> MaskEvents:
        """Return the reports since the last call. taken: output of the step whose result is being taken, on the
        host."""
        self._held.take(taken)
        events, self._events = self._events, MaskEvents()
        events.ready += self._held.due()
        if self._requests or self._prepared:
            for notice in self._link.notices():
                events.ready += notice.ready
                events.failed |= notice.failures
                events.compiled += notice.prepared
                for number in notice.prepared:
                    self._prepared.pop(number, None)
            if self._link.fault:  # admit the waiting requests, each of which fails with this reason
                events.compiled += self._prepared
                self._prepared.clear()
        return events

    def fill(self, rounds: Sequence[int], width: int, finals: Sequence[int], wait_s: float) -> dict[int, Failure]:
        """Copy the masks and guides of a step to the device. Waits for the previous step, then at most `wait_s`.

        rounds: slots that verify a tree of `width` nodes.
        finals: slots whose prompt ends in this step.
        A slot without a mask in time is marked `HELD`. Returns the failures of requests whose mask cannot be filled, by
        index in (*rounds, *finals).
        """
        for emitted, _ in self._unread:
            emitted.wait()
        began_s = time.perf_counter()
        advanced = self._read()
        masks = self.masks
        masks.clear()
        entries = [(i, slot, width if i < len(rounds) else 1) for i, slot in enumerate((*rounds, *finals))]
        requests = {
            slot: request for _, slot, _ in entries if (request := self._by_slot.get(slot)) and not request.is_over
        }
        asked = [(i, slot, count) for i, slot, count in entries if slot in requests]
        num_guided = max(MIN_GUIDED_NODES, MAX_GUIDED_NODES // max(1, len(entries)))
        has_guides = masks.host_guides is not None
        fills = tuple(
            Fill(requests[slot].number, count, number if has_guides else NOWHERE, num_guided)
            for number, (_, slot, count) in enumerate(asked)
        )
        filled = self._ask(advanced, fills, wait_s)
        failures, num_rows = dict[int, Failure](), 0
        if filled is not None:
            num_rows = filled.num_rows
            failures = {asked[index][0]: failure for index, failure in filled.failures.items()}
            self.num_forced += filled.num_forced
            self.work_s += filled.took_s
        elif self._link.fault:
            failures = {i: Failure(self._link.fault, True) for i, _, _ in asked}
        for index, (_, slot, _) in enumerate(asked):
            row = LATE if filled is None else filled.rows[index]
            masks.host_index[slot] = HELD if row == LATE else row
            if filled is None and not self._link.fault:
                self._held.add(requests[slot])  # the process may have filled it, but answered too late
            requests[slot].is_held |= row == LATE
            if masks.host_guides is not None and row != LATE:
                masks.host_guides.index[slot] = index
        masks.upload(num_rows)
        self.fill_s += time.perf_counter() - began_s
        self.num_fills += 1
        return failures

    def agree(self, group: TPGroup, finished: Tensor) -> None:
        """Hold a request on all ranks if one rank holds it, and use a guide only if it is the same on all ranks.

        finished: [num_slots + 1] bool, on the device. Held slots are set, so they emit nothing from this step on.
        """
        masks = self.masks
        held = masks.index == HELD
        if group.size > 1:
            mine = torch.stack((masks.index, self._digests()))
            everyone = group.all_gather(mine)
            held = (everyone[:, 0] == HELD).any(0)
            if masks.guides is not None:
                differs = (everyone[:, 1] != everyone[0, 1]).any(0)
                masks.guides.index.masked_fill_(differs, NOWHERE)
        finished.logical_or_(held)
        masks.index.masked_fill_(held, FREE)

    def record_step(self, entries: Sequence[int], emitted: HostOutput) -> None:
        """Record a launched step. entries: slots of its entries."""
        mine = [(i, self._by_slot[slot]) for i, slot in enumerate(entries) if slot in self._by_slot]
        self._unread.append((emitted, mine))
        self._held.add_step(emitted, mine)

    def close(self) -> None:
        """End the process."""
        self._link.close()

    def _digests(self) -> Tensor:
        """Return a digest of each slot's guide: [num_slots + 1] int32, on the device. Ranks may differ."""
        masks = self.masks
        digests = np.zeros(masks.host_index.shape[0], np.int32)
        if masks.host_guides is not None:
            blocks = masks.host_guides.blocks.numpy()
            for slot, number in enumerate(masks.host_guides.index.tolist()):
                if number != NOWHERE:
                    digests[slot] = zlib.crc32(blocks[number].tobytes()) & 0x7FFFFFFF
        return torch.from_numpy(digests).to(masks.index.device, non_blocking=True)

    def _read(self) -> list[Advanced]:
        """Return the tokens of the steps whose results were not read yet."""
        advanced = []
        for emitted, entries in self._unread:
            counts, finish, tokens = emitted.counts.tolist(), emitted.finish.tolist(), emitted.tokens.tolist()
            drafts = None if emitted.drafts is None else emitted.drafts.tolist()
            for entry, request in entries:
                new = tokens[entry][: counts[entry]]
                request.output += new
                request.is_over |= finish[entry] != FINISH_NONE
                if not new or request.is_over or request.is_gone:
                    continue
                drafted, parents = ([], []) if drafts is None else drafts[entry]
                advanced.append(Advanced(request.number, new, drafted, parents))
        self._unread.clear()
        return advanced

    def _ask(self, advanced: list[Advanced], fills: tuple[Fill, ...], wait_s: float) -> Filled | None:
        """Return the process's answer; None if it does not arrive in time."""
        began_s, generation = time.perf_counter(), self._generation
        if not fills or not self._connect(wait_s):
            return None
        if generation != self._generation:  # the new process has received all tokens
            advanced = [msgspec.structs.replace(request, tokens=[]) for request in advanced]
        left_s = wait_s - (time.perf_counter() - began_s)
        return self._link.ask(Order(0, advanced=tuple(advanced), fills=fills), max(left_s, wait_s / 2))

    def _connect(self, wait_s: float = 0.0) -> bool:
        """Return whether the mask process runs, after waiting for its start at most `wait_s`. If it is a new process,
        after a crash, send it all grammars and the requests that are not over."""
        if not self._link.is_up(wait_s):
            return False
        if self._generation != self._link.generation:
            self._generation = self._link.generation
            self._count_crash()
            entered = tuple(self._entered(request) for request in self._requests.values() if not request.is_over)
            self._link.send(Order(0, dict(self._prepared), (), entered))
        return self._link.is_up()

    def _count_crash(self) -> None:
        """Count a crash for each request whose masks were being filled. End requests with `MAX_CRASHES`."""
        for number in self.masks.running[self.masks.running >= 0].tolist():
            self._crashes[number] = self._crashes.get(number, 0) + 1
            if self._crashes[number] >= MAX_CRASHES and number in self._requests:
                self._forget(number)
                self._events.failed[number] = Failure("the grammar ended the process that fills its masks", True)
        self.masks.running.fill(-1)

    def _forget(self, number: int) -> None:
        if (request := self._requests.pop(number, None)) is not None:
            request.is_gone = True

    def _entered(self, request: GrammarRequest) -> Entered:
        return Entered(request.number, request.grammar, pack_i32(request.output), self._tolerates_violations)
