"""Chooses which recurrent states of running requests are saved, at which positions and in which rows.

Owned by `SlotPages` in models with recurrent layers. Called by the scheduler and its parts while they build a plan.

A prompt's state is saved
- at the last page boundary before its end, where the same prompt can resume;
- at a fork, the page boundary before the first token that differs from another prompt's;
- in between, every `PROMPT_INTERVALS` intervals: after the last end of a turn in the chunk, because prompts often
  differ from there on, or at the chunk's end. So a second prompt with the same prefix recomputes little.
An answer's state is saved once per interval, so that the next turn of a conversation resumes near the answer's end. The
previous state is released once the new one is certain to be written; without a second free row, it is overwritten.

Nothing is read from the device. The step of a chunk saves a prompt's state. An answer's state is saved by the first
round that begins at or after its position, because a round's recurrent state includes only tokens accepted by earlier
rounds. The host's lengths are one step old, so each new position is beyond the reach of steps in flight. When the
request leaves its slot, a row is kept only if its state is certain.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aerie.attention.kv_cache.prefix_cache import Match, PrefixCache
from aerie.attention.kv_cache.radix_node import SnapshotKind
from aerie.workers.scheduling.plan import pack_i32

Int64s = npt.NDArray[np.int64]
PROMPT_INTERVALS = 8  # intervals between two states of a long prompt
FORK_INTERVALS = 1  # minimum intervals that resuming at a fork must save, because saving there splits a chunk
ANSWER_SHARE = 0.5  # maximum share of the snapshot rows for running answers


@dataclass
class _SlotSaves:
    """Saved states of one request.

    wanted: prompt positions whose state should be saved, ascending, each with its kind.
    last: the newest position with a state, in the prefix cache or planned.
    planned: rows and kinds of states saved by planned steps, by position; not in the prefix cache yet.
    row: snapshot row for its answer; -1 for none.
    """

    wanted: dict[int, SnapshotKind]
    last: int
    planned: dict[int, tuple[int, SnapshotKind]]
    row: int = -1


class StateSaves:
    """Saved states of all slots; arrays by slot.

    interval: tokens between saved states of an answer, a multiple of the page size.
    target: position of the answer's newest planned state; 0 for none.
    folded: known number of tokens that the recurrent state includes: the length at the start of the newest round with a
        known result.
    saved: position of the answer's state before `target`; 0 for none.
    former: row of that state; -1 if it is the row of `target`, which overwrites it.
    """

    def __init__(self, cache: PrefixCache, num_slots: int, interval: int) -> None:
        assert cache.snapshots is not None and interval % cache.page_size == 0
        self._cache = cache
        self._snapshots = cache.snapshots
        self.interval = interval
        self._size = cache.page_size  # tokens
        self._max_answers = int(ANSWER_SHARE * len(self._snapshots.rows))
        self._slots: dict[int, _SlotSaves] = {}
        self.target = np.zeros(num_slots, np.int64)
        self.folded = np.zeros(num_slots, np.int64)
        self.saved = np.zeros(num_slots, np.int64)
        self.former = np.full(num_slots, -1, np.int64)
        self._declined = np.zeros(num_slots, np.int64)  # the last target that got no row
        self._this_plan: dict[int, tuple[int, int]] = {}  # by slot, position and row of the plan being built

    def reset(self) -> None:
        """Forget all states: the ranks' memory is gone, and all requests have left their slots."""
        self._slots.clear()
        self._this_plan.clear()
        for numbers in (self.target, self.folded, self.saved, self._declined):
            numbers[:] = 0
        self.former[:] = -1

    def enter(self, slot: int, match: Match, num_tokens: int) -> None:
        """Start a slot's request of `num_tokens` prompt tokens. match: its cached prefix."""
        matched, last = len(match.pages) * self._size, (num_tokens - 1) // self._size * self._size
        wanted = {}
        if match.is_fork and matched < last and self.is_worth_waiting(matched - match.num_saved):
            wanted[matched] = SnapshotKind.FORK
        if last > match.num_saved:
            wanted[last] = SnapshotKind.PROMPT
        self._slots[slot] = _SlotSaves(wanted, match.num_saved, {})

    def is_worth_waiting(self, num_tokens: int) -> bool:
        """Return whether a state at a fork that saves `num_tokens` tokens is worth one more step of the prompt."""
        return num_tokens >= FORK_INTERVALS * self.interval

    def chunk_tokens(self, slot: int, start: int, count: int) -> int:
        """Return the length of a chunk of at most `count` prompt tokens from `start`. A chunk saves one state, so a
        chunk with several wanted positions ends at the first one."""
        passed = [position for position in self._slots[slot].wanted if start < position <= start + count]
        return passed[0] - start if len(passed) > 1 else count

    def plan_chunk(self, slot: int, start: int, tokens: npt.NDArray[np.int32], turn_ends: tuple[int, ...] = ()) -> None:
        """Plan to save a state of this chunk: at the first wanted position in it; else, if the last saved state is far
        behind, after its last end of a turn or at its end. Saves none if no row is free.

        tokens: the chunk's tokens, from position `start` on.
        turn_ends: token ids that end a turn of a conversation.
        """
        end = start + len(tokens)
        saves = self._slots[slot]
        wanted = next((position for position in saves.wanted if start < position <= end), None)
        if wanted is not None:
            self._save(slot, wanted, saves.wanted[wanted])
            saves.wanted = {position: kind for position, kind in saves.wanted.items() if position > end}
            return
        page_end = end // self._size * self._size  # the last page boundary in the chunk
        earliest = max(start + 1, saves.last + PROMPT_INTERVALS * self.interval)
        if page_end >= earliest:
            ends = np.flatnonzero(np.isin(tokens[: page_end - start], turn_ends))
            turn_end = start + int(ends[-1]) + 1 - self._cache.lookahead if len(ends) else 0
            turn_page_end = turn_end // self._size * self._size
            self._save(slot, turn_page_end if turn_page_end >= earliest else page_end, SnapshotKind.CHUNK)

    def want(self, slot: int, position: int, start: int, end: int) -> bool:
        """Request a state at `position` of this slot's prompt, where another request would resume. Return whether one
        is or will be saved there.

        position: a page boundary.
        start, end: the slot's chunk in the plan being built; equal without one.
        """
        saves = self._slots[slot]
        if position in saves.planned or position in saves.wanted:
            return True
        if position <= start:
            return False
        if position > end:
            saves.wanted = dict(sorted((saves.wanted | {position: SnapshotKind.FORK}).items()))
            return True
        planned = self._this_plan.pop(slot, None)
        if planned is None:
            return self._save(slot, position, SnapshotKind.FORK)
        del saves.planned[planned[0]]  # a chunk saves only one state: the one that the other request waits for
        self._put(slot, position, planned[1], SnapshotKind.FORK)
        return True

    def plan_rounds(self, slots: Int64s, lengths: Int64s, margin: int) -> None:
        """Plan to save states of answers in the rounds of the plan being built.

        slots: [n] slots that run a round.
        lengths: [n] maximum number of tokens that the state includes when this round begins.
        margin: tokens before a position at which its save is planned, at least as many as a round emits.
        """
        following = (lengths // self.interval + 1) * self.interval
        is_written = self.target[slots] <= self.folded[slots]
        for slot in slots[is_written & (self.former[slots] >= 0)].tolist():
            self._snapshots.give_back(int(self.former[slot]))
            self.former[slot] = -1
        is_due = is_written & (following - lengths <= margin)
        is_due &= (self.target[slots] != following) & (self._declined[slots] != following)
        for index in np.flatnonzero(is_due).tolist():
            slot, position = int(slots[index]), int(following[index])
            saves = self._slots[slot]
            if saves.row < 0:
                saves.row = self._lend_for_answer(position - saves.last)
            elif (free := self._cache.lend_row(0, SnapshotKind.ANSWER)) is not None:
                self.former[slot], saves.row = saves.row, free
            if saves.row < 0:
                self._declined[slot] = position
                continue
            self.saved[slot], self.target[slot] = self.target[slot], position
            self._this_plan[slot] = (position, saves.row)

    def take(self) -> bytes:
        """Return the states that the plan saves, as `StepPlan.saved_states`. Ends the plan."""
        self._snapshots.plan_ended()
        if not self._this_plan:
            return b""
        packed = pack_i32([n for slot, (position, row) in self._this_plan.items() for n in (slot, position, row)])
        self._this_plan.clear()
        return packed

    def attach_states(self, slot: int, tokens: npt.NDArray[np.int32], num_pages: int, salt: bytes) -> None:
        """Attach the states that earlier plans save to the first `num_pages` pages of the slot's `tokens`, which the
        prefix cache has now."""
        planned, new = self._slots[slot].planned, self._this_plan.get(slot)
        for position in [p for p in planned if p <= num_pages * self._size and (new is None or new[0] != p)]:
            self._cache.attach(tokens, position, *planned.pop(position), salt)

    def leave(
        self,
        slot: int,
        tokens: npt.NDArray[np.int32],
        num_pages: int,
        starts: tuple[int, int] | None,
        salt: bytes,
    ) -> None:
        """Free a slot's rows, after attaching the states that are still useful.

        num_pages: pages of its `tokens` that the prefix cache has; 0 if nothing of the request may be cached.
        starts: length at the start of its next round in flight, and the maximum length at the start of the last one;
            None without rounds in flight.
        """
        self.attach_states(slot, tokens, num_pages, salt)
        saves = self._slots.pop(slot)
        self._this_plan.pop(slot, None)
        for row, _ in saves.planned.values():
            self._snapshots.give_back(row)
        self._leave_answer(slot, saves.row, tokens, num_pages * self._size, starts or (0, 0), salt)
        for numbers in (self.target, self.folded, self.saved, self._declined):
            numbers[slot] = 0
        self.former[slot] = -1

    def _leave_answer(
        self, slot: int, row: int, tokens: npt.NDArray[np.int32], end: int, starts: tuple[int, int], salt: bytes
    ) -> None:
        """Attach the answer's newest certain state up to position `end`; give its other rows back. An answer has up to
        two rows: `row`, where a round writes the state of `target`, and `former` with the state of `saved`. Without
        `former`, `row` has the state of `saved` until that round.

        starts: see `leave`.
        """
        target, saved, former = int(self.target[slot]), int(self.saved[slot]), int(self.former[slot])
        is_written = target <= max(int(self.folded[slot]), starts[0])
        certain = {former: saved, row: target if is_written else 0}  # position of each row's state; 0: it may be either
        if former < 0 and not is_written and starts[1] < target:  # no round can have overwritten the previous state
            certain[row] = saved
        certain = {row: position for row, position in certain.items() if row >= 0}
        newest = max((position for position in certain.values() if position <= end), default=0)
        for row, position in certain.items():
            if 0 < position == newest:
                self._cache.attach(tokens, position, row, SnapshotKind.ANSWER, salt)
            else:
                self._snapshots.give_back(row)

    def _save(self, slot: int, position: int, kind: SnapshotKind) -> bool:
        """Plan to save a prompt's state. Return whether a row was free."""
        row = self._cache.lend_row(position - self._slots[slot].last, kind)
        if row is not None:
            self._put(slot, position, row, kind)
        return row is not None

    def _put(self, slot: int, position: int, row: int, kind: SnapshotKind) -> None:
        saves = self._slots[slot]
        saves.planned[position] = row, kind
        saves.last = position
        self._this_plan[slot] = (position, row)

    def _lend_for_answer(self, num_tokens: int) -> int:
        num_answers = sum(saves.row >= 0 for saves in self._slots.values())
        row = self._cache.lend_row(num_tokens, SnapshotKind.ANSWER) if num_answers < self._max_answers else None
        return -1 if row is None else row
