"""State of the running requests on the device: one row per slot.

The last row is the padding slot. It is always finished, and its page table is zeros (the dummy page). The host never
reads the tables. `SlotTable.facts` has the parts of each slot's `SlotInit` that the host needs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aerie.kernels.sampling.filters import Filters
from aerie.kernels.sampling.penalties import PenaltyTables
from aerie.kernels.slots.commit import Commit, CommitTables, commit
from aerie.workers.scheduling.plan import (
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
    SlotInit,
    StepPlan,
    unpack_i32,
)

NO_TOKEN = -1


@dataclass(frozen=True)
class SlotFacts:
    """Host-side properties of the request in a slot. number: see `SlotInit`."""

    sampling: SamplingParams
    number: int = -1

    @property
    def is_random(self) -> bool:
        """Whether the request is sampled. Filters that keep one token make it greedy, so that ties, which are common in
        bfloat16, go to the lowest id."""
        s = self.sampling
        return s.temperature > 0 and s.top_k != 1 and s.top_p > 0

    @property
    def is_filtered(self) -> bool:
        """Whether filters may exclude tokens."""
        s = self.sampling
        return self.is_random and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0)

    @property
    def shapes_logits(self) -> bool:
        """Whether the request changes logits before sampling: penalties, biases, or min_tokens."""
        s = self.sampling
        return s.needs_token_counts or bool(s.logit_bias) or s.min_tokens > 0


class SlotTable:
    """All tensors have num_slots + 1 rows. Comments in the constructor describe them.

    max_tokens: maximum tokens of a request in engines with `RoundShapes.keeps_tokens`; 0 in others.
    """

    def __init__(
        self, num_slots: int, max_pages: int, vocab_size: int, device: torch.device, max_tokens: int = 0
    ) -> None:
        rows = num_slots + 1
        self.padding_slot = num_slots
        self.vocab_size = vocab_size
        self.device = device

        def filled(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full((rows, *shape), value, dtype=dtype, device=device)

        self.page_table = filled(0, torch.int32, max_pages)
        self.seq_len = filled(0, torch.int32)  # committed KV tokens, without the bonus
        # Parameters share three tensors, so that a new request writes three rows. The fields are their columns.
        self._ints = filled(0, torch.int64, 5)
        self.bonus, self.max_len, self.min_len, self.seed, self.top_k = self._ints.unbind(1)
        self._floats = filled(0, torch.float32, 6)
        self.temperature, self.top_p, self.min_p = self._floats[:, :3].unbind(1)
        self.penalties = self._floats[:, 3:]  # presence, frequency, repetition - 1
        self._flags = filled(False, torch.bool, 2)
        self.finished, self.shapes_logits = self._flags.unbind(1)
        self.finished[:] = True
        self.stop_ids = filled(NO_TOKEN, torch.int64, MAX_STOP_TOKEN_IDS)
        self.tokens = filled(0, torch.int32, max_tokens)  # prompt and output by position, including the newest token
        # [rows, vocab], for requests that change logits. Allocated at the start, because captured steps hold the
        # addresses.
        self.output_counts = filled(0, torch.int32, vocab_size)
        self.in_prompt = filled(False, torch.bool, vocab_size)
        self.bias = filled(0.0, torch.float32, vocab_size)
        self.commit_tables = CommitTables(
            self.seq_len,
            self.bonus,
            self.max_len,
            self.finished,
            self.shapes_logits,
            self.stop_ids,
            self.output_counts,
            self.seed,
        )
        self.penalty_tables = PenaltyTables(
            self.output_counts,
            self.in_prompt,
            self.bias,
            self.penalties,
            self.min_len,
            self.stop_ids,
            self.shapes_logits,
        )
        self.filters = Filters(self.temperature, self.top_k, self.top_p, self.min_p)
        self.facts: dict[int, SlotFacts] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all tables; on the meta device, the bytes that they would have."""
        tables = (self.page_table, self.seq_len, self._ints, self._floats, self._flags, self.stop_ids, self.tokens)
        return sum(table.nbytes for table in (*tables, self.output_counts, self.in_prompt, self.bias))

    def columns(self, plan: StepPlan) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays that `enter` needs on the device; empty if the plan has no new requests or pages."""
        columns: dict[str, npt.NDArray[Any]] = {}
        if plan.inits:
            columns |= _init_columns(plan.inits)
        for init in plan.inits:
            if self.tokens.shape[1] and (init.prompt or init.output):
                columns[f"tokens of {init.slot}"] = unpack_i32(init.prompt + init.output)
            if SlotFacts(init.sampling).shapes_logits:
                columns |= {f"{name} of {init.slot}": array for name, array in _shaping_columns(init).items()}
        if plan.page_updates:
            slots, places, pages = unpack_i32(plan.page_updates).reshape(-1, 3).T
            columns |= {"paged slots": slots.astype(np.int64), "paged places": places.astype(np.int64), "pages": pages}
        return columns

    def enter(self, plan: StepPlan, columns: Mapping[str, Tensor]) -> None:
        """Apply a plan's new requests and page-table changes. columns: the result of `columns`, on the device; requests
        whose parameters failed have default ones there."""
        if plan.inits:
            slots = columns["init slots"]
            # A new request starts with dummy pages, so that its page table never refers to another request's pages.
            self.page_table.index_fill_(0, slots, 0)  # an assignment would copy the 0 from the host, synchronously
            self.seq_len[slots] = columns["init cached"]
            self._ints[slots] = columns["init ints"]
            self._floats[slots] = columns["init floats"]
            self._flags[slots] = columns["init flags"]
            self.stop_ids[slots] = columns["init stops"]
        for init in plan.inits:
            self.facts[init.slot] = facts = SlotFacts(init.sampling, init.number)
            if facts.shapes_logits and f"{_SHAPING[0]} of {init.slot}" in columns:
                self._init_shaping(init.slot, columns)
            if (tokens := columns.get(f"tokens of {init.slot}")) is not None:
                self.tokens[init.slot, : tokens.shape[0]] = tokens
        if plan.page_updates:
            self.page_table[columns["paged slots"], columns["paged places"]] = columns["pages"]

    def _init_shaping(self, slot: int, columns: Mapping[str, Tensor]) -> None:
        """Write the output counts, prompt tokens and biases of a request that changes its logits. The host sends token
        ids. They are counted by operations of known output size, which need no device sync."""
        output, prompt, biased, bias = (columns[f"{name} of {slot}"] for name in _SHAPING)
        self.output_counts[slot].zero_().scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        self.in_prompt[slot].zero_().scatter_(0, prompt, True)
        self.bias[slot].zero_().scatter_(0, biased, bias)

    def commit(self, slots: Tensor, tokens: Tensor, counts: Tensor) -> Commit:
        """See `aerie.kernels.slots.commit`. The KV of the root and of all valid tokens except the last must be in
        the pool."""
        return Commit(tokens, *commit(slots, tokens, counts, self.commit_tables))


def _init_columns(inits: Sequence[SlotInit]) -> dict[str, npt.NDArray[Any]]:
    """Return the rows that new requests write, by table."""
    stops = np.full((len(inits), MAX_STOP_TOKEN_IDS), NO_TOKEN)
    ints, floats, flags = [], [], []
    for row, init in enumerate(inits):
        sampling = init.sampling
        facts = SlotFacts(sampling)
        assert len(sampling.stop_token_ids) <= MAX_STOP_TOKEN_IDS, "API validation limits stop_token_ids"
        stops[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        min_len = init.prompt_len + sampling.min_tokens
        ints.append((0, init.max_len, min_len, _signed(sampling.seed), sampling.top_k))
        floats.append(
            (
                sampling.temperature if facts.is_random else 0.0,
                sampling.top_p,
                sampling.min_p,
                sampling.presence_penalty,
                sampling.frequency_penalty,
                sampling.repetition_penalty - 1.0,
            )
        )
        flags.append((False, facts.shapes_logits))
    return {
        "init slots": np.array([init.slot for init in inits], np.int64),
        "init cached": np.array([init.num_cached for init in inits], np.int32),
        "init ints": np.array(ints, np.int64),
        "init floats": np.array(floats, np.float32),
        "init flags": np.array(flags, np.bool_),
        "init stops": stops,
    }


_SHAPING = ("output", "prompt", "biased", "bias")


def _shaping_columns(init: SlotInit) -> dict[str, npt.NDArray[Any]]:
    """Return the tokens so far and the biases of a request with `shapes_logits`, under the names of `_SHAPING`."""
    bias = init.sampling.logit_bias
    arrays = (
        unpack_i32(init.output).astype(np.int64),
        unpack_i32(init.prompt).astype(np.int64),
        np.array(list(bias), np.int64),
        np.array(list(bias.values()), np.float32),
    )
    return dict(zip(_SHAPING, arrays, strict=True))


def _signed(seed: int) -> int:
    """Return the lowest 64 bits of `seed` as a signed integer."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed
