"""The grammars of an engine's slots on one rank: which requests have one, and their masks and guides of each step.

Every rank has a process of its own that follows the grammars (`workers.structured_output.mask_host`): what it follows
are the tokens that were emitted, which are equal on all ranks, and so are masks and guides. A step's masks are filled
while the target's pass runs: what the step before emitted and drafted was copied to the host meanwhile. Which masks
are there in time may differ between ranks; `agree` makes one decision of it on the device. Used by
`workers.runner.worker`.
"""

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from workers.distributed.tp_group import TPGroup
from workers.ops.sampling.masks import FREE
from workers.scheduling.plan import FINISH_NONE, Failure, Grammar, StepPlan, pack_i32, unpack_i32
from workers.structured_output.guide_table import NOWHERE
from workers.structured_output.host_link import HostLink
from workers.structured_output.mask_messages import LATE, Advanced, Entered, Fill, Filled, Order
from workers.structured_output.mask_table import HELD, MaskTable

GUIDED_NODES = 256  # of a step: each takes some 20 us of the host, which the target's pass must hide
LEAST_GUIDED = 4  # of each tree
MAX_CRASHES = 2  # of the process, while it filled masks of a request
FIRST_RETRY_S = 0.02  # until a request that another rank held is tried again, doubled each time
MAX_RETRY_S = 0.64


class Emitted(Protocol):
    """What a step's entries emitted and drafted, on the host or on its way there."""

    def wait(self) -> None:
        """Until it is here."""

    @property
    def tokens(self) -> Tensor:
        """[n, M] int64."""

    @property
    def counts(self) -> Tensor:
        """[n] int64, tokens of each."""

    @property
    def finish(self) -> Tensor:
        """[n] int64, FINISH_*."""

    @property
    def drafts(self) -> Tensor | None:
        """[n, 2, W] int64, tokens and parents of the tree that each verifies next; None without a draft."""


@dataclass(eq=False)
class _Stay:
    """A request's time in a slot.

    number: of the request.
    output: tokens that it has emitted.
    is_over: it has ended.
    is_held: one of its masks was late, so that it emits nothing more in this slot.
    """

    number: int
    grammar: Grammar
    output: list[int]
    is_over: bool = False
    is_held: bool = False


@dataclass
class News:
    """What the process has said since it was last asked.

    ready: late requests whose masks are there.
    failed: late requests that will never have one.
    compiled: grammars, by number.
    """

    ready: list[int] = field(default_factory=list)
    failed: dict[int, Failure] = field(default_factory=dict)
    compiled: list[int] = field(default_factory=list)


class SlotGrammars:
    """The grammars of an engine's slots on one rank.

    folder: of the model, whose tokenizer is read with the first grammar.
    forgives: a request that leaves its grammar starts it again; for synthetic acceptance, which ignores masks.
    fill_s, num_fills: seconds that steps waited for masks so far, and the number of such steps.
    work_s: seconds that the process took for these.
    num_forced: accepted drafts within texts that grammars forced.
    """

    def __init__(self, folder: str, vocab_size: int, masks: MaskTable, forgives: bool = False) -> None:
        self.masks = masks
        self.fill_s = 0.0
        self.work_s = 0.0
        self.num_fills = 0
        self.num_forced = 0
        self._forgives = forgives
        self._link = HostLink(folder, vocab_size, masks)
        self._generation = 0
        self._by_slot: dict[int, _Stay] = {}
        self._stays: dict[int, _Stay] = {}  # by request, those without a slot too
        self._unread: list[tuple[Emitted, list[tuple[int, _Stay]]]] = []
        self._prepared: dict[int, Grammar] = {}  # not compiled yet
        self._num_announced = 0
        self._crashes: dict[int, int] = {}
        self._news = News()
        self._had_masks: list[tuple[Emitted, list[tuple[int, _Stay]]]] = []  # by step whose result was not taken
        self._num_held: dict[int, int] = {}  # times in a row that other ranks held a request
        self._retries: list[tuple[float, int]] = []  # when requests shall be tried again

    def begin(self) -> None:
        """Start the process, so that the first grammar need not wait for it."""
        self._link.begin()

    def enter(self, plan: StepPlan) -> None:
        """Take over a plan's requests and grammars, and forget those that have ended."""
        dropped = unpack_i32(plan.ended).tolist()
        prepared = dict(enumerate(plan.grammars, self._num_announced))
        self._num_announced += len(prepared)
        self._prepared |= prepared
        entered = []
        for number in dropped:
            self._stays.pop(number, None)
            self._crashes.pop(number, None)
            self._num_held.pop(number, None)
        for init in plan.inits:
            self._by_slot.pop(init.slot, None)
            grammar = init.sampling.grammar
            if grammar is not None:
                stay = _Stay(init.number, grammar, unpack_i32(init.output).tolist())
                self._by_slot[init.slot] = self._stays[init.number] = stay
                entered.append(self._entered(stay))
        if not (dropped or prepared or entered) or not self._is_up():
            return
        self._link.tell(Order(0, prepared, tuple(dropped), tuple(entered)))

    def news(self, taken: Emitted) -> News:
        """What was said since the last call. taken: what the step emitted whose result is being taken, on the host."""
        self._find_held(taken)
        if self._stays or self._prepared:
            for notice in self._link.notices():
                self._news.ready += notice.ready
                self._news.failed |= notice.failures
                self._news.compiled += notice.prepared
                for number in notice.prepared:
                    self._prepared.pop(number, None)
            if self._link.fault:  # the requests are to come and hear of it
                self._news.compiled += self._prepared
                self._prepared.clear()
        news, self._news = self._news, News()
        return news

    def fill(self, rounds: Sequence[int], width: int, finals: Sequence[int], wait_s: float) -> dict[int, Failure]:
        """Bring the masks and guides of a step to the device: for each of `rounds`, slots that verify trees of `width`
        nodes, and for `finals`, slots whose prompts end. Waits for the step before, and then `wait_s` at most. What has
        no mask is `HELD`; returns why, by index in (*rounds, *finals), where it will never have one."""
        for emitted, _ in self._unread:
            emitted.wait()
        began_s = time.perf_counter()
        advanced = self._read()
        masks = self.masks
        masks.clear()
        entries = [(i, slot, width if i < len(rounds) else 1) for i, slot in enumerate((*rounds, *finals))]
        stays = {slot: stay for _, slot, _ in entries if (stay := self._by_slot.get(slot)) and not stay.is_over}
        asked = [(i, slot, count) for i, slot, count in entries if slot in stays]
        num_guided = max(LEAST_GUIDED, GUIDED_NODES // max(1, len(entries)))
        has_guides = masks.host_guides is not None
        fills = tuple(
            Fill(stays[slot].number, count, number if has_guides else NOWHERE, num_guided)
            for number, (_, slot, count) in enumerate(asked)
        )
        filled = self._ask(advanced, fills, wait_s)
        failures, num_rows = dict[int, Failure](), 0
        if filled is not None:
            num_rows = filled.num_rows
            failures = {asked[place][0]: failure for place, failure in filled.failures.items()}
            self.num_forced += filled.num_forced
            self.work_s += filled.took_s
        elif self._link.fault:
            failures = {i: Failure(self._link.fault, True) for i, _, _ in asked}
        for place, (_, slot, _) in enumerate(asked):
            row = LATE if filled is None else filled.rows[place]
            masks.host_index[slot] = HELD if row == LATE else row
            stays[slot].is_held |= row == LATE
            if masks.host_guides is not None and row != LATE:
                masks.host_guides.index[slot] = place
        masks.upload(num_rows)
        self.fill_s += time.perf_counter() - began_s
        self.num_fills += 1
        return failures

    def agree(self, group: TPGroup, finished: Tensor) -> None:
        """Have every rank hold the requests that one of them holds, and follow a guide only where all have the same:
        what is held is marked in `finished` [num_slots + 1] bool, so that it emits nothing in this step and no other.
        All on the device."""
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

    def ran(self, entries: Sequence[int], emitted: Emitted) -> None:
        """A step was launched whose entries are these slots."""
        mine = [(i, self._by_slot[slot]) for i, slot in enumerate(entries) if slot in self._by_slot]
        self._unread.append((emitted, mine))
        self._had_masks.append((emitted, [(i, stay) for i, stay in mine if not stay.is_held]))

    def close(self) -> None:
        """End the process."""
        self._link.close()

    def _find_held(self, taken: Emitted) -> None:
        """Find the requests that had their masks here and emitted nothing in a step, because another rank held them.

        Only rank 0's news reach the scheduler, and its own process has nothing to say of them: they are tried again
        after a while, and later each time, since the other rank may need long.
        """
        now_s = time.monotonic()
        if self._had_masks and self._had_masks[0][0] is taken:
            _, entries = self._had_masks.pop(0)
            counts = taken.counts.tolist() if entries else []
            for entry, stay in entries:
                if counts[entry]:
                    self._num_held.pop(stay.number, None)
                elif not (stay.is_held or stay.is_over) and self._stays.get(stay.number) is stay:
                    stay.is_held = True
                    times = self._num_held[stay.number] = self._num_held.get(stay.number, -1) + 1
                    self._retries.append((now_s + min(MAX_RETRY_S, FIRST_RETRY_S * 2**times), stay.number))
        if self._retries:
            self._news.ready += [number for due_s, number in self._retries if due_s <= now_s]
            self._retries = [each for each in self._retries if each[0] > now_s]

    def _digests(self) -> Tensor:
        """[num_slots + 1] int32 on the device: of each slot's guide, of which ranks may have learnt other things."""
        masks = self.masks
        found = np.zeros(masks.host_index.shape[0], np.int32)
        if masks.host_guides is not None:
            blocks = masks.host_guides.blocks.numpy()
            for slot, number in enumerate(masks.host_guides.index.tolist()):
                if number != NOWHERE:
                    found[slot] = zlib.crc32(blocks[number].tobytes()) & 0x7FFFFFFF
        return torch.from_numpy(found).to(masks.index.device, non_blocking=True)

    def _read(self) -> list[Advanced]:
        """What the steps before emitted."""
        advanced = []
        for emitted, entries in self._unread:
            counts, finish, tokens = emitted.counts.tolist(), emitted.finish.tolist(), emitted.tokens.tolist()
            drafts = None if emitted.drafts is None else emitted.drafts.tolist()
            for entry, stay in entries:
                new = tokens[entry][: counts[entry]]
                stay.output += new
                stay.is_over |= finish[entry] != FINISH_NONE
                if self._stays.get(stay.number) is not stay or not new or stay.is_over:
                    continue  # it has entered again, with what it emitted; or nothing more is wanted
                drafted, parents = ([], []) if drafts is None else drafts[entry]
                advanced.append(Advanced(stay.number, new, drafted, parents))
        self._unread.clear()
        return advanced

    def _ask(self, advanced: list[Advanced], fills: tuple[Fill, ...], wait_s: float) -> Filled | None:
        """The process's answer; None if there is none in time."""
        began_s, generation = time.perf_counter(), self._generation
        if not fills or not self._is_up(wait_s):
            return None
        if generation != self._generation:  # the new process was told of all tokens
            advanced = [msgspec.structs.replace(each, tokens=[]) for each in advanced]
        left_s = wait_s - (time.perf_counter() - began_s)
        return self._link.ask(Order(0, advanced=tuple(advanced), fills=fills), max(left_s, wait_s / 2))

    def _is_up(self, wait_s: float = 0.0) -> bool:
        """Whether there is a process, which knows all that it should."""
        if not self._link.is_up(wait_s):
            return False
        if self._generation != self._link.generation:
            self._generation = self._link.generation
            self._blame()
            entered = tuple(self._entered(stay) for stay in self._stays.values() if not stay.is_over)
            self._link.tell(Order(0, dict(self._prepared), (), entered))
        return self._link.is_up()

    def _blame(self) -> None:
        """Requests whose masks were being filled when the process ended."""
        for number in self.masks.running[self.masks.running >= 0].tolist():
            self._crashes[number] = self._crashes.get(number, 0) + 1
            if self._crashes[number] >= MAX_CRASHES and number in self._stays:
                del self._stays[number]
                self._news.failed[number] = Failure("the grammar ended the process that fills its masks", True)
        self.masks.running.fill(-1)

    def _entered(self, stay: _Stay) -> Entered:
        return Entered(stay.number, stay.grammar, pack_i32(stay.output), self._forgives)
