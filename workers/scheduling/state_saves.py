"""Chooses which states of running requests are saved, at which positions and in which rows.

Owned by `SlotPages`, if the model has recurrent layers; called by the scheduler's other parts while they build a plan.

A prompt's state is saved
- at the last page border before its end, where the same prompt resumes;
- at a fork: where the text of another prompt has left it, so that the next one resumes there;
- on the way, every `PROMPT_INTERVALS` intervals: at the last end of a turn in a chunk, where texts part, or at the end
  of the chunk. So the second prompt that begins like this one computes little again.
An answer's state is saved once an interval, and the one before is given up once it is certain that the new one is
written. So the next turn of a conversation resumes near the answer's end. Where no row is free for a second one, the
first is overwritten.

Nothing is read from the device. A prompt's state is written by its chunk's step. An answer's is written by the first
round that begins at or after its position, because rounds fold what earlier ones have accepted. Lengths on the host are
one step old. So a position is chosen beyond everything that the steps in flight can reach, and when the request leaves
its slot the row is kept only if it is certain which state it holds.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attention.kv_cache.prefix_cache import Match, PrefixCache
from attention.kv_cache.radix_node import SnapshotKind
from workers.scheduling.plan import pack_i32

Int64s = npt.NDArray[np.int64]
PROMPT_INTERVALS = 8  # between states on the way through a long prompt
FORK_INTERVALS = 1  # intervals that a saved fork must spare, because it cuts a prompt's chunk
ANSWER_SHARE = 0.5  # largest share of the rows for running answers


@dataclass
class _SlotSaves:
    """Saved states of one request.

    wanted: prompt positions whose state will be saved, ascending, with the reason.
    last: the newest position that has a state, in the tree or planned.
    planned: rows and kinds of states in planned steps, by position; not in the tree yet.
    row: snapshot row for its answer; -1 for none.
    """

    wanted: dict[int, SnapshotKind]
    last: int
    planned: dict[int, tuple[int, SnapshotKind]]
    row: int = -1


class StateSaves:
    """interval: tokens between saved states of an answer, a multiple of the page size.

    target: by slot, the position that the row of the answer is to hold next; 0 while there is none.
    folded: by slot, the length at which the newest round began whose result is known: the state has seen so much.
    saved: by slot, the position of the answer's state before `target`; 0 for none.
    former: by slot, the row that still holds that state; -1: it is in the same row as `target`, until that is written.
    """

    def __init__(self, cache: PrefixCache, num_slots: int, interval: int) -> None:
        assert cache.snapshots is not None and interval % cache.page_size == 0
        self._cache = cache
        self._snapshots = cache.snapshots
        self.interval = interval
        self._size = cache.page_size
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
        """A request of `num_tokens` prompt tokens has a slot; match: what the cache had."""
        matched, last = len(match.pages) * self._size, (num_tokens - 1) // self._size * self._size
        wanted = {}
        if match.is_fork and matched < last and self.is_worth_waiting(matched - match.num_saved):
            wanted[matched] = SnapshotKind.FORK
        if last > match.num_saved:
            wanted[last] = SnapshotKind.PROMPT
        self._slots[slot] = _SlotSaves(wanted, match.num_saved, {})

    def is_worth_waiting(self, num_tokens: int) -> bool:
        """Whether a state at a fork, which saves so many tokens, is worth another step of a prompt."""
        return num_tokens >= FORK_INTERVALS * self.interval

    def chunk_tokens(self, slot: int, start: int, count: int) -> int:
        """Return the length of a chunk of at most `count` prompt tokens from `start`: a chunk saves one state, so it
        ends at the first of two wanted positions."""
        passed = [position for position in self._slots[slot].wanted if start < position <= start + count]
        return passed[0] - start if len(passed) > 1 else count

    def plan_chunk(self, slot: int, start: int, tokens: npt.NDArray[np.int32], turn_ends: tuple[int, ...] = ()) -> None:
        """Plan to save a state within a chunk, where one is wanted and a row is free.

        tokens: of the slot's prompt, from position `start` on, which the plan computes.
        turn_ends: tokens that end a turn of a conversation."""
        end = start + len(tokens)
        saves = self._slots[slot]
        border = end // self._size * self._size
        position = next((wanted for wanted in saves.wanted if start < wanted <= end), border)
        kind = saves.wanted.get(position)
        if kind is not None:
            self._save(slot, position, kind)
            saves.wanted = {wanted: why for wanted, why in saves.wanted.items() if wanted > end}
            return
        earliest = max(start + 1, saves.last + PROMPT_INTERVALS * self.interval)
        if border >= earliest:
            ends = np.flatnonzero(np.isin(tokens[: border - start], turn_ends))
            last_turn = start + int(ends[-1]) + 1 - self._cache.lookahead if len(ends) else 0
            after_turn = last_turn // self._size * self._size
            self._save(slot, after_turn if after_turn >= earliest else border, SnapshotKind.CHUNK)

    def want(self, slot: int, position: int, start: int, end: int) -> bool:
        """Another request resumes at `position` of this one's prompt, the end of a page; whether a state is or will be
        there. start, end: its tokens in the plan being built, equal if it has none there."""
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
        del saves.planned[planned[0]]  # one state a chunk: the one that is waited for
        self._put(slot, position, planned[1], SnapshotKind.FORK)
        return True

    def plan_rounds(self, slots: Int64s, lengths: Int64s, margin: int) -> None:
        """The plan has a round of `slots`, the state of which has seen at most `lengths` tokens when it ends. margin:
        tokens before a position at which it is planned, at least as many as a round emits."""
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
        """The states that the plan saves, as `StepPlan.saved_states`. The plan is built."""
        self._snapshots.plan_ended()
        if not self._this_plan:
            return b""
        packed = pack_i32([n for slot, (position, row) in self._this_plan.items() for n in (slot, position, row)])
        self._this_plan.clear()
        return packed

    def inserted(self, slot: int, tokens: npt.NDArray[np.int32], num_pages: int, salt: bytes) -> None:
        """The tree has the first `num_pages` pages of the slot's `tokens`: keep the states at their ends that plans
        before the one being built write."""
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
        """A request leaves its slot. num_pages: of its `tokens`, which the tree has; 0: nothing of it may be kept.
        starts: lengths at which the next of its rounds in flight begins, and the last one at most; None: there are
        none."""
        self.inserted(slot, tokens, num_pages, salt)
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
        """Keep the newest state of an answer that is certain and at most at position `end`; give other rows back."""
        target, saved, former = int(self.target[slot]), int(self.saved[slot]), int(self.former[slot])
        is_written = target <= max(int(self.folded[slot]), starts[0])
        held = {former: saved, row: target if is_written else 0}
        if former < 0 and not is_written and starts[1] < target:  # nothing has been written over the one before
            held[row] = saved
        held = {row: position for row, position in held.items() if row >= 0}
        newest = max((position for position in held.values() if position <= end), default=0)
        for row, position in held.items():
            if 0 < position == newest:
                self._cache.attach(tokens, position, row, SnapshotKind.ANSWER, salt)
            else:
                self._snapshots.give_back(row)

    def _save(self, slot: int, position: int, kind: SnapshotKind) -> bool:
        """Save a prompt's state in the plan being built. Return whether a row was free."""
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
