"""A rank without a model: tokens, accepted counts and stops follow from the request's seed and the position alone.

So the same request gets the same tokens however it was batched, preempted or resumed. With `KvModel` it also keeps what
a KV pool would hold and checks that every position read holds what the request's own tokens would have put there.
"""

import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from aerie.attention.kv_cache.window_pages import WindowSizes
from aerie.kernels.slots.finish import FINISH_LENGTH, FINISH_NONE, FINISH_STOP
from aerie.workers.config import RoundShape, RoundShapes
from aerie.workers.scheduling.commands.command import Captured, Command, CommandAnswer
from aerie.workers.scheduling.cost_table import CostTable
from aerie.workers.scheduling.plan import (
    Chunk,
    GraphCount,
    PromptLogprobs,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenLogprobs,
    pack_i32,
    unpack_i32,
)

VOCABULARY = 1000
_JUNK = -1


def scripted_token(seed: int, position: int) -> int:
    """The token that the request of `seed` has at `position`."""
    return (seed * 7919 + position * 104729 + (position * position) % 977) % VOCABULARY


def scripted_accepted(seed: int, position: int, max_new_tokens: int) -> int:
    """Draft tokens that a round accepts whose bonus token stands at `position`."""
    return (seed * 31 + position * 17) % 97 % max_new_tokens


def scripted_output(prompt_len: int, sampling: SamplingParams) -> list[int]:
    """Everything a request emits, by the script."""
    output: list[int] = []
    for position in range(prompt_len, prompt_len + sampling.max_tokens):
        output.append(scripted_token(sampling.seed, position))
        if output[-1] in sampling.stop_token_ids:
            break
    return output


class KvModel:
    """What the pool would hold: for each position a number that stands for all tokens up to it (`lookahead` 1: and for
    the next one, as an EAGLE draft's KV does).

    window_of: window page of each page, as the ranks know it; None in a model without windows.
    in_windows: what window pages hold, by position in them.
    """

    def __init__(self, num_pages: int, page_size: int, lookahead: int, window: WindowSizes | None = None) -> None:
        self.page_size = page_size
        self.lookahead = lookahead
        self.window = window
        self.content = np.full(((num_pages + 1) * page_size, 2), _JUNK, np.int64)
        self.window_of = None if window is None else np.zeros(num_pages + 1, np.int64)
        self.in_windows = np.full(((0 if window is None else window.num_pages + 1) * page_size,), _JUNK, np.int64)

    def attach(self, updates: bytes) -> None:
        """Apply `StepPlan.window_updates`."""
        pairs = unpack_i32(updates).reshape(-1, 2)
        if self.window_of is None:
            assert not len(pairs)
            return
        assert len(set(pairs[:, 0].tolist())) == len(pairs), "a page changes twice in a plan"
        assert self.window is not None and (pairs[:, 1] <= self.window.num_pages).all()
        self.window_of[pairs[:, 0]] = pairs[:, 1]

    def window_rows(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where layers with a window have the positions that lie at `rows`; fails if a window page is missing."""
        assert self.window_of is not None
        where = self.window_of[rows // self.page_size]
        assert (where > 0).all(), "a position in a window has no window page"
        return where * self.page_size + rows % self.page_size

    def rows(self, table: Sequence[int], start: int, end: int) -> npt.NDArray[np.int64]:
        """Where positions start .. end - 1 lie; fails if a page is missing."""
        positions = np.arange(start, end)
        pages = np.array([table[i] for i in range(end // self.page_size + 1) if i < len(table)], np.int64)
        assert end == start or (end - 1) // self.page_size < len(pages), f"no page for position {end - 1}"
        where = pages[positions // self.page_size]
        assert (where > 0).all(), f"no page for a position in {start}..{end - 1}"
        rows: npt.NDArray[np.int64] = where * self.page_size + positions % self.page_size
        return rows

    def write(self, table: Sequence[int], tokens: list[int], start: int, end: int) -> None:
        """KV of positions start .. end - 1; the last one's draft KV only if its next token is in `tokens`."""
        wanted = self._wanted(tokens)
        rows = self.rows(table, start, end)
        self.content[rows, 0] = wanted[start:end, 0]
        self.content[rows, 1] = wanted[start:end, 1]
        if self.window is not None:
            where = self.window_rows(rows)
            assert len(set(where.tolist())) == len(where), "two positions of a request share a window page"
            self.in_windows[where] = wanted[start:end, 0]

    def spoil(self, table: Sequence[int], start: int, end: int) -> None:
        """Positions that a round may write but does not commit: each where the table has it, whoever was promised the
        page, which is what a GPU does. Where the table has nothing, page 0 is written."""
        for position in range(start, end):
            index = position // self.page_size
            page = table[index] if index < len(table) else 0
            self.content[page * self.page_size + position % self.page_size] = _JUNK
            if self.window_of is not None:
                self.in_windows[self.window_of[page] * self.page_size + position % self.page_size] = _JUNK

    def reserved(self, table: Sequence[int], start: int, end: int) -> None:
        """Positions start .. end - 1, which a round may write, have pages of all kinds."""
        rows = self.rows(table, start, end)
        if self.window is not None:
            self.window_rows(rows)

    def check(self, table: Sequence[int], tokens: list[int], end: int) -> None:
        """Positions 0 .. end - 1 hold what `tokens` make; `tokens` must reach one further with lookahead."""
        rows, wanted = self.rows(table, 0, end), self._wanted(tokens)
        assert (self.content[rows] == wanted[:end]).all(), "a KV position holds another request's content"
        if self.window is not None:  # what the row at position `end` sees
            first = max(0, end - self.window.window + 1)
            found = self.in_windows[self.window_rows(rows[first:])]
            assert (found == wanted[first:end, 0]).all(), "a position in a window holds another request's content"
            assert self.window_of is not None  # rows may load positions before their window, too, if they are masked
            attached = self.window_of[rows[:first] // self.page_size]
            found = self.in_windows[attached * self.page_size + rows[:first] % self.page_size]
            assert ((found == wanted[:first, 0]) | (attached == 0)).all(), "a page has another page's window page"

    def _wanted(self, tokens: list[int]) -> npt.NDArray[np.int64]:
        values = np.asarray(tokens, np.int64) + 1
        weights = np.arange(1, len(tokens) + 1) * 2654435761 + 97
        target = np.cumsum(values * weights)
        draft = target + np.append(values[1:], 0) * 31 if self.lookahead else np.zeros_like(target)
        return np.stack((target, draft), axis=1)


class StateModel:
    """What recurrent layers would keep: of each slot and each snapshot row the tokens that its state has seen, in the
    order in which steps write them. A slot's state is behind its committed length: a round folds what earlier ones have
    accepted, whether or not the request has ended since.

    targets: by slot, the position and row of `StepPlan.saved_states` that a round writes.
    """

    def __init__(self, num_slots: int) -> None:
        self._slots: dict[int, tuple[int, ...]] = dict.fromkeys(range(num_slots), (_JUNK,))
        self._saved: dict[int, tuple[int, ...]] = {}
        self.targets: dict[int, tuple[int, int]] = {}

    def enter(self, slot: int, row: int, tokens: list[int]) -> None:
        """A request enters `slot` with `tokens` that need not be computed."""
        self.targets.pop(slot, None)
        if row >= 0:
            self._slots[slot] = self._saved[row]
            assert self._slots[slot] == tuple(tokens), "a snapshot holds the state of other tokens"
        else:
            assert not tokens, "a request resumes without a state"

    def chunk(self, slot: int, start: int, tokens: list[int], saved: tuple[int, int] | None) -> None:
        """Prompt tokens run from position `start` on."""
        before = self._slots[slot] if start else ()
        assert len(before) == start and _JUNK not in before, "a chunk begins at another state"
        self._slots[slot] = before + tuple(tokens)
        if saved is not None:
            position, row = saved
            assert start < position <= start + len(tokens), "a chunk does not pass the position that it saves"
            self._saved[row] = self._slots[slot][:position]

    def round(self, slot: int, tokens: list[int]) -> None:
        """A round of `slot` begins, with `tokens` committed."""
        before = self._slots[slot]
        assert before == tuple(tokens[: len(before)]), "a slot's state has seen another request's tokens"
        self._slots[slot] = tuple(tokens)
        position, row = self.targets.get(slot, (-1, -1))
        if len(before) <= position <= len(tokens):
            self._saved[row] = tuple(tokens[:position])


def _prompt_logprobs(chunk: Chunk) -> PromptLogprobs:
    """Token t has log-probability -t."""
    tokens = np.append(unpack_i32(chunk.tokens)[1:], chunk.next_token)[: chunk.num_logprobs]
    return PromptLogprobs(chunk.start + 1, (-tokens).astype("<f4").tobytes(), pack_i32(tokens * 0 + 1))


class _Slot:
    def __init__(self) -> None:
        self.table: list[int] = []
        self.tokens: list[int] = []  # known to the rank: only kept with a KvModel, positions before chunks unknown
        self.seq_len = 0
        self.seed = 0
        self.max_len = 0
        self.stops: frozenset[int] = frozenset()
        self.drafted = 0  # shape of the tree that the next round verifies
        self.logprobs = -1
        self.finished = True


class ScriptedExecutor:
    """Implements `aerie.workers.runner.executor.StepExecutor`; a step runs when it is submitted.

    prompts: by seed, what prompts must hold, so that the KV of prefix-cached tokens can be checked too. delay_s: time a
    step takes, during which `ready` is false.
    """

    def __init__(
        self,
        shapes: RoundShapes,
        num_slots: int,
        table_width: int,
        kv: KvModel | None = None,
        prompts: dict[int, list[int]] | None = None,
        delay_s: float = 0.0,
        states: StateModel | None = None,
    ) -> None:
        self.shapes = shapes
        self.costs: CostTable | None = None
        self.graphs = GraphCount()
        self.capture_steps: list[int] = []
        self.slots = [_Slot() for _ in range(num_slots)]
        self.kv = kv
        self.states = states
        self.prompts = prompts if prompts is not None else {}
        self.delay_s = delay_s
        self.num_steps = 0
        self._table_width = table_width
        self._pending: deque[tuple[float, StepResult]] = deque()

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def ready(self) -> bool:
        return bool(self._pending) and time.monotonic() >= self._pending[0][0]

    def take(self) -> StepResult:
        done_s, result = self._pending.popleft()
        if self.delay_s:
            time.sleep(max(0.0, done_s - time.monotonic()))
        return result

    def carry_out(self, command: Command) -> tuple[CommandAnswer, ...]:
        """Stand for a capture."""
        assert not self._pending and command.step not in self.capture_steps
        self.capture_steps.append(command.step)
        if self.delay_s:
            time.sleep(self.delay_s)
        count = self.graphs
        self.graphs = GraphCount(count.num_captured + 1, count.num_waiting - 1, count.missed_rows)
        return (CommandAnswer(command.epoch, command.step, 0, Captured(self.graphs)),)

    def submit(self, plan: StepPlan) -> None:
        assert len(self._pending) < 2, "a third step was submitted"
        self._apply_tables(plan)
        entries: list[tuple[list[int], int, int]] = []  # tokens, FINISH_*, accepted
        logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        shape = self.shapes[plan.shape]
        round_slots = unpack_i32(plan.slots).tolist()
        chunk_slots = [chunk.slot for chunk in plan.chunks]
        used = round_slots + chunk_slots
        assert len(set(used)) == len(used), "a slot runs twice in a step"
        last = [chunk for chunk in plan.chunks if chunk.next_token == -1]
        saved = {slot: (p, row) for slot, p, row in unpack_i32(plan.saved_states).reshape(-1, 3).tolist()}
        assert 3 * len(saved) == len(unpack_i32(plan.saved_states)), "a slot saves two states"
        assert self.states is not None or not saved
        if self.states is not None:
            self.states.targets |= {slot: each for slot, each in saved.items() if slot not in chunk_slots}
            for slot in round_slots:
                self.states.round(slot, self.slots[slot].tokens[: self.slots[slot].seq_len])
        entries += [self._round(self.slots[slot], shape, plan.max_kv_len) for slot in round_slots]
        for chunk in plan.chunks:
            self._chunk(chunk, plan.max_kv_len, saved.get(chunk.slot))
        for chunk in last:
            entries.append(self._first_token(self.slots[chunk.slot]))
        drafting = plan.drafting or bytes(len(entries))
        for slot_id, drafts in zip(round_slots + [chunk.slot for chunk in last], drafting, strict=True):
            self._draft(self.slots[slot_id], plan.next_shape if drafts else 0, plan.max_kv_len)
        for index, (slot_id, (tokens, _, _)) in enumerate(
            zip(round_slots + [chunk.slot for chunk in last], entries, strict=True)
        ):
            if tokens and self.slots[slot_id].logprobs >= 0:
                logprobs[index] = tuple(TokenLogprobs(-float(token)) for token in tokens)
        self.num_steps += 1
        result = StepResult(
            epoch=plan.epoch,
            step=plan.step,
            counts=pack_i32([len(tokens) for tokens, _, _ in entries]),
            tokens=pack_i32([token for tokens, _, _ in entries for token in tokens]),
            finish=bytes(finish for _, finish, _ in entries),
            accepted=pack_i32([accepted for _, _, accepted in entries]),
            logprobs=logprobs,
            prompt_logprobs=tuple(_prompt_logprobs(chunk) for chunk in plan.chunks if chunk.logprobs >= 0),
            elapsed_s=self.delay_s,
            took_s=self.delay_s,
            graphs=self.graphs,
        )
        self._pending.append((time.monotonic() + self.delay_s, result))

    def _apply_tables(self, plan: StepPlan) -> None:
        updates = unpack_i32(plan.page_updates).reshape(-1, 3).tolist()
        assert len({(slot, index) for slot, index, _ in updates}) == len(updates), "an entry changes twice in a plan"
        for slot_id, index, page in updates:
            table = self.slots[slot_id].table
            assert 0 <= index < self._table_width, f"index {index} outside a table of {self._table_width} pages"
            table += [0] * (index + 1 - len(table))
            table[index] = page
        if self.kv is not None:
            self.kv.attach(plan.window_updates)
        for init in plan.inits:
            slot = self.slots[init.slot]
            sampling = init.sampling
            slot.seq_len, slot.seed, slot.max_len = init.num_cached, sampling.seed, init.max_len
            slot.stops, slot.drafted = frozenset(sampling.stop_token_ids), 0
            slot.logprobs, slot.finished = sampling.logprobs, True  # no rounds before the last chunk
            known = self.prompts.get(sampling.seed, [])
            replayed = [scripted_token(slot.seed, p) for p in range(len(known), init.num_cached + 1)]
            slot.tokens = (known + replayed)[: init.num_cached]
            self._check_cached(slot, known + replayed)
            if self.states is not None:
                self.states.enter(init.slot, init.state_row, slot.tokens)

    def _check_cached(self, slot: _Slot, tokens: list[int]) -> None:
        if self.kv is not None and slot.seq_len:
            self.kv.check(slot.table, tokens[: slot.seq_len + 1], slot.seq_len)

    def _chunk(self, chunk: Chunk, max_kv_len: int, saved: tuple[int, int] | None) -> None:
        slot = self.slots[chunk.slot]
        tokens = unpack_i32(chunk.tokens).tolist()
        assert chunk.start == slot.seq_len, f"chunk at {chunk.start}, slot has {slot.seq_len} tokens"
        end = chunk.start + len(tokens)
        assert end <= max_kv_len
        if self.kv is not None:
            slot.tokens += tokens
            following = [chunk.next_token] if chunk.next_token >= 0 else [scripted_token(slot.seed, end)]
            store_from = max(chunk.store_from, chunk.start)
            self.kv.check(slot.table, slot.tokens + following, min(store_from, end))
            if store_from < end:
                self.kv.write(slot.table, slot.tokens + following, store_from, end)
        if self.states is not None:
            self.states.chunk(chunk.slot, chunk.start, tokens, saved)
        else:
            assert not chunk.store_from, "KV is kept from a later position, without a state to compute"
        slot.seq_len = end

    def _first_token(self, slot: _Slot) -> tuple[list[int], int, int]:
        slot.finished = False
        tokens, finish = self._emit(slot, slot.seq_len, 1)
        return tokens, finish, -1

    def _draft(self, slot: _Slot, shape: int, max_kv_len: int) -> None:
        """The next tree of `slot`; it writes KV after what is committed, finished or not."""
        slot.drafted = shape
        end = slot.seq_len + self.shapes[shape].draft_tokens
        if shape:
            assert end <= max_kv_len, "max_kv_len is too low for a draft"
        if self.kv is not None:
            self.kv.reserved(slot.table, slot.seq_len, end)
            self.kv.spoil(slot.table, slot.seq_len, end)

    def _round(self, slot: _Slot, shape: RoundShape, max_kv_len: int) -> tuple[list[int], int, int]:
        start, end = slot.seq_len, slot.seq_len + shape.width
        assert end <= max_kv_len, "max_kv_len is too low for a round"
        if self.kv is not None:
            self.kv.check(slot.table, slot.tokens, start)
            self.kv.reserved(slot.table, start, end)
            self.kv.spoil(slot.table, start, end)
        if slot.finished:
            return [], FINISH_NONE, -1
        verifies = slot.drafted > 0 and shape.width > 1
        most = min(shape.max_new_tokens, self.shapes[slot.drafted].max_new_tokens)
        accepted = scripted_accepted(slot.seed, start, most) if verifies else 0
        tokens, finish = self._emit(slot, start + 1, accepted + 1)
        slot.seq_len += len(tokens)
        if self.kv is not None:
            self.kv.write(slot.table, slot.tokens, start, slot.seq_len)
        return tokens, finish, accepted if verifies else -1

    def _emit(self, slot: _Slot, position: int, count: int) -> tuple[list[int], int]:
        """Up to `count` tokens from `position` on, cut behind a stop token and at the budget."""
        tokens, finish = [], FINISH_NONE
        for p in range(position, min(position + count, slot.max_len)):
            tokens.append(scripted_token(slot.seed, p))
            if tokens[-1] in slot.stops:
                finish = FINISH_STOP
                break
        else:
            if position + len(tokens) == slot.max_len:
                finish = FINISH_LENGTH
        slot.finished = finish != FINISH_NONE
        if self.kv is not None:
            slot.tokens += tokens
        return tokens, finish
