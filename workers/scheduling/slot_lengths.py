"""Host-side lengths of each slot's request, as arrays by slot. Base of `aerie.workers.scheduling.slot_pages`.

Plan n + 1 is built before result n is read, so the host's lengths are one step old. Each slot has its last known
committed length, and bounds on the tokens that rounds in flight add.
"""

import numpy as np
import numpy.typing as npt

from aerie.workers.config import RoundShape

Int64s = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int64]

MEAN_GAPS = 256  # minimum number of gaps in a request's mean, once it has had so many


class SlotLengths:
    """The lengths of all slots, as arrays by slot.

    committed: KV tokens known on the host, without the newest token.
    num_tokens: known prompt and output tokens.
    max_len: prompt_len + max_tokens.
    max_pending: maximum tokens that rounds in flight may commit.
    min_pending: minimum tokens that rounds and last chunks in flight emit: one each.
    num_pages: length of the page list.
    decoding: whether it runs rounds.
    speculative: whether it uses drafts.
    rare_sampling: `SamplingParams.is_rare`.
    drafted: index of the shape drafted by the last plan; 0: none.
    last_token_s: time of its newest tokens.
    gaps_since_s, num_gaps: start and number of the gaps between tokens that `mean_gap_ms` averages.
    number: the number of the slot's request, -1 without one; results for another number are stale.
    num_changes: increases when a slot is taken, starts to decode, or is freed.
    """

    def __init__(self, num_slots: int) -> None:
        self.committed = np.zeros(num_slots, np.int64)
        self.num_tokens = np.zeros(num_slots, np.int64)
        self.max_len = np.zeros(num_slots, np.int64)
        self.max_pending = np.zeros(num_slots, np.int64)
        self.min_pending = np.zeros(num_slots, np.int64)
        self.num_pages = np.zeros(num_slots, np.int64)
        self.decoding = np.zeros(num_slots, np.bool_)
        self.speculative = np.zeros(num_slots, np.bool_)
        self.rare_sampling = np.zeros(num_slots, np.bool_)
        self.drafted = np.zeros(num_slots, np.int64)
        self.number = np.full(num_slots, -1, np.int64)
        self.last_token_s = np.zeros(num_slots, np.float64)
        self.gaps_since_s = np.zeros(num_slots, np.float64)
        self.num_gaps = np.zeros(num_slots, np.int64)
        self.num_changes = 0

    def start_decoding(self, slot: int) -> None:
        """Record that the slot runs rounds from the next plan on, and that its first token is in flight."""
        self.num_changes += 1
        self.decoding[slot] = True
        self.min_pending[slot] += 1

    def round_slots(self) -> Slots:
        """Return the slots that run a round, ascending: those that decode and will not certainly end in a step in
        flight."""
        return np.flatnonzero(self.decoding & (self.num_tokens + self.min_pending < self.max_len))

    def round_ends(self, slots: Slots, shape: RoundShape, next_shape: RoundShape) -> Int64s:
        """Return [n]: the end of the positions that each slot's next round may write. It verifies `shape` and, if the
        request speculates, drafts `next_shape`."""
        last = self.max_len[slots] - 1  # maximum committed length of a request
        start = np.minimum(self.committed[slots] + self.max_pending[slots], last)
        committed = np.minimum(start + shape.max_new_tokens, last)
        drafted_ends = np.where(self.speculative[slots], committed + next_shape.draft_tokens, 0)
        ends: Int64s = np.maximum(start + shape.width, drafted_ends)
        return ends

    def plan_round(self, slots: Slots, max_new_tokens: int) -> None:
        """Record that a round of `slots` is in flight."""
        self.max_pending[slots] += max_new_tokens
        self.min_pending[slots] += 1

    def take_tokens(self, rounds: Slots, first: Slots, now_s: float) -> None:
        """Record tokens that arrived at `now_s`.

        rounds: slots whose requests had tokens before.
        first: slots whose requests got their first token.

        At twice `MEAN_GAPS` gaps, half of them are dropped, as if all were equally long.
        """
        for slots in (rounds, first):
            self.last_token_s[slots] = now_s
        self.gaps_since_s[first] = now_s
        self.num_gaps[rounds] += 1
        many = rounds[self.num_gaps[rounds] >= 2 * MEAN_GAPS]
        self.gaps_since_s[many] = (self.gaps_since_s[many] + now_s) / 2
        self.num_gaps[many] //= 2

    def mean_gap_ms(self) -> float:
        """Return the shortest mean gap between tokens of any running request; 0 without gaps. The mean is over its
        newest `MEAN_GAPS` to twice as many gaps, or all if there are fewer."""
        slots = np.flatnonzero(self.decoding & (self.num_gaps > 0))
        if len(slots) == 0:
            return 0.0
        means_s = (self.last_token_s[slots] - self.gaps_since_s[slots]) / self.num_gaps[slots]
        return float(means_s.min()) * 1000

    def clear_lengths(self, slot: int) -> None:
        """Clear the slot, whose request has left."""
        self.num_changes += 1
        lengths = (self.committed, self.num_tokens, self.max_len, self.max_pending, self.min_pending, self.num_pages)
        for values in (*lengths, self.decoding, self.speculative, self.rare_sampling, self.drafted, self.num_gaps):
            values[slot] = 0
        self.number[slot] = -1
