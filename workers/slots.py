"""State of the running requests on the device, one row per slot, and the copy of a step's arrays to it. The last row is
the padding slot: always finished, its page table zeros (the dummy page). The host never reads the tables;
`SlotTable.facts` has the parts of each slot's `SlotInit` that it needs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aerie.attention.setting import Number
from aerie.kernels.capability import ALIGNED_BYTES, Capability
from aerie.kernels.sampling.filters import Filters
from aerie.kernels.sampling.penalties import PenaltyTables
from aerie.kernels.slots.commit import Commit, CommitTables, commit
from aerie.kernels.to_device import to_device
from aerie.workers.scheduling.plan import MAX_STOP_TOKEN_IDS, VALUES, SamplingParams, SlotInit, StepPlan, unpack_i32

T = TypeVar("T")
NO_TOKEN = -1  # in place of a missing token


@dataclass(frozen=True)
class SlotFacts:
    """Host-side properties of the request in a slot, computed once. number: see `SlotInit`; the others:
    `SamplingParams`."""

    sampling: SamplingParams
    number: int
    is_random: bool
    is_filtered: bool
    shapes_logits: bool
    is_adapted: bool

    @staticmethod
    def of(init: SlotInit) -> "SlotFacts":
        s = init.sampling
        return SlotFacts(s, init.number, s.is_random, s.is_filtered, s.shapes_logits, init.adapter >= 0)


@dataclass(frozen=True)
class Column:
    """A column of a slot's row. of: its value for a new request."""

    name: str
    kind: type[Number]
    of: Callable[[SlotInit], Number]


# The slot's own state, then the declared values. Kernels get the columns by the names of their dataclasses' fields.
COLUMNS = (
    Column("bonus", int, lambda init: 0),
    Column("max_len", int, lambda init: init.max_len),
    Column("min_len", int, lambda init: init.prompt_len + init.sampling.min_tokens),
    Column("position_shift", int, lambda init: init.position_shift),
    Column("adapter", int, lambda init: init.adapter),
    Column("finished", bool, lambda init: False),
    Column("shapes_logits", bool, lambda init: init.sampling.shapes_logits),
    *(Column(value.name, value.kind, value.column) for value in VALUES.values() if value.on_device),
)
_DTYPES: dict[type[Number], torch.dtype] = {int: torch.int64, float: torch.float32, bool: torch.bool}
_BY_KIND = {kind: [column for column in COLUMNS if column.kind is kind] for kind in _DTYPES}


class SlotTable:
    """All tensors have num_slots + 1 rows. Comments in the constructor describe them.

    max_tokens: maximum tokens of a request in engines with `RoundShapes.keeps_tokens`; 0 in others.
    num_axes: rotary positions of a prompt's token, as in `aerie.workers.prompt_inputs.PromptInputs`.
    """

    def __init__(
        self,
        num_slots: int,
        max_pages: int,
        vocab_size: int,
        device: torch.device,
        max_tokens: int = 0,
        num_axes: int = 1,
    ) -> None:
        rows = num_slots + 1
        self.padding_slot = num_slots
        self.vocab_size = vocab_size
        self.device = device
        self.num_axes = num_axes

        def filled(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full((rows, *shape), value, dtype=dtype, device=device)

        self.page_table = filled(0, torch.int32, max_pages)
        self.seq_len = filled(0, torch.int32)  # committed KV tokens, without the bonus
        # Columns of one dtype share a tensor, so that a new request writes three rows.
        self._tables = {kind: filled(0, dtype, len(_BY_KIND[kind])) for kind, dtype in _DTYPES.items()}
        self.values = {
            column.name: self._tables[kind][:, i] for kind in _DTYPES for i, column in enumerate(_BY_KIND[kind])
        }
        self.bonus, self.max_len, self.min_len = (self.values[name] for name in ("bonus", "max_len", "min_len"))
        self.shifts = self.values["position_shift"]
        self.finished, self.shapes_logits = self.values["finished"], self.values["shapes_logits"]
        floats = [column.name for column in _BY_KIND[float]]
        first = floats.index("presence_penalty")
        assert floats[first : first + 3] == ["presence_penalty", "frequency_penalty", "repetition_penalty"]
        self.penalties = self._tables[float][:, first : first + 3]
        self.finished[:] = True
        self.values["adapter"][:] = -1
        self.stop_ids = filled(NO_TOKEN, torch.int64, MAX_STOP_TOKEN_IDS)
        self.tokens = filled(0, torch.int32, max_tokens)  # prompt and output by position, including the newest token
        # [rows, vocab], for requests that change logits. Allocated at the start, because captured steps hold the
        # addresses.
        self.output_counts = filled(0, torch.int32, vocab_size)
        self.in_prompt = filled(False, torch.bool, vocab_size)
        self.bias = filled(0.0, torch.float32, vocab_size)
        self.commit_tables = self.view(CommitTables)
        self.penalty_tables = self.view(PenaltyTables)
        self.filters = self.view(Filters)
        self.facts: dict[int, SlotFacts] = {}

    @property
    def always_shifts(self) -> bool:
        """Whether the rounds of all requests add `position_shift` to their rotary positions: in models with M-RoPE, so
        that captured rounds do it."""
        return self.num_axes > 1

    @property
    def num_bytes(self) -> int:
        """Bytes of all tables; on the meta device, the bytes that they would have."""
        tables = (self.page_table, self.seq_len, *self._tables.values(), self.stop_ids, self.tokens)
        return sum(table.nbytes for table in (*tables, self.output_counts, self.in_prompt, self.bias))

    def view(self, kernel_tables: type[T]) -> T:
        """Return a kernel's dataclass of columns, filled by the names of its fields."""
        return kernel_tables(**{field.name: self._column(field.name) for field in fields(kernel_tables)})  # type: ignore[arg-type]

    def _column(self, name: str) -> Tensor:
        column: Tensor = self.values[name] if name in self.values else vars(self)[name]
        return column

    def columns(self, plan: StepPlan) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays that `enter` needs on the device; empty if the plan has no new requests or pages."""
        columns: dict[str, npt.NDArray[Any]] = {}
        if plan.inits:
            columns |= _init_arrays(plan.inits)
        for init in plan.inits:
            if self.tokens.shape[1] and (init.prompt or init.output):
                columns[f"tokens of {init.slot}"] = unpack_i32(init.prompt + init.output)
            if init.sampling.shapes_logits:
                columns |= {f"{name} of {init.slot}": array for name, array in _shaping_arrays(init).items()}
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
            for kind, table in self._tables.items():
                table[slots] = columns[f"init {kind.__name__}"]
            self.stop_ids[slots] = columns["init stops"]
        for init in plan.inits:
            self.facts[init.slot] = facts = SlotFacts.of(init)
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


def _init_arrays(inits: Sequence[SlotInit]) -> dict[str, npt.NDArray[Any]]:
    """Return arrays with one row per new request, by name: slots, cached tokens, stop tokens, and the values of the
    slot table's columns, one array per type."""
    stops = np.full((len(inits), MAX_STOP_TOKEN_IDS), NO_TOKEN)
    for row, init in enumerate(inits):
        ids = init.sampling.stop_token_ids
        assert len(ids) <= MAX_STOP_TOKEN_IDS, "API validation limits stop_token_ids"
        stops[row, : len(ids)] = ids
    arrays: dict[str, npt.NDArray[Any]] = {
        "init slots": np.array([init.slot for init in inits], np.int64),
        "init cached": np.array([init.num_cached for init in inits], np.int32),
        "init stops": stops,
    }
    for kind, dtype in ((int, np.int64), (float, np.float32), (bool, np.bool_)):
        values = [[column.of(init) for column in _BY_KIND[kind]] for init in inits]
        arrays[f"init {kind.__name__}"] = np.array(values, dtype)
    return arrays


_SHAPING = ("output", "prompt", "biased", "bias")


def _shaping_arrays(init: SlotInit) -> dict[str, npt.NDArray[Any]]:
    """Return the tokens so far and the biases of a request with `shapes_logits`, under the names of `_SHAPING`."""
    bias = init.sampling.logit_bias
    arrays = (
        unpack_i32(init.output).astype(np.int64),
        unpack_i32(init.prompt).astype(np.int64),
        np.array(list(bias), np.int64),
        np.array(list(bias.values()), np.float32),
    )
    return dict(zip(_SHAPING, arrays, strict=True))


Columns = Mapping[str, npt.NDArray[Any]]

_TORCH: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}


def upload(columns: Columns, device: torch.device) -> dict[str, Tensor]:
    """Copy arrays (int64, int32, float32 or bool, any shape) to `device`. Makes one asynchronous copy, because each
    copy through pinned memory takes tens of microseconds of the host, regardless of its size."""
    if not columns or Capability.of(device).shares_host_memory:
        return {name: torch.from_numpy(np.array(array)) for name, array in columns.items()}
    kinds: dict[np.dtype[Any], list[str]] = {}
    for name, array in columns.items():
        kinds.setdefault(array.dtype, []).append(name)
    host, ends = _packed(columns, kinds)
    sent: dict[str, Tensor] = {}
    regions = to_device(host, device).split(ends)  # type: ignore[no-untyped-call]
    for (kind, names), region in zip(kinds.items(), regions, strict=True):
        unit = columns[names[0]].itemsize
        sizes = [size for name in names for size in _size_and_padding(columns[name].nbytes, unit)]
        for name, piece in zip(names, region.view(_TORCH[kind]).split(sizes)[::2], strict=True):
            sent[name] = piece if columns[name].ndim == 1 else piece.view(columns[name].shape)
    return sent


def _packed(columns: Columns, kinds: Mapping[np.dtype[Any], list[str]]) -> tuple[Tensor, list[int]]:
    """Return all columns as one [n] uint8 tensor, grouped by dtype, and the number of bytes of each group."""
    parts: list[bytes] = []
    sizes = []
    for names in kinds.values():
        before = len(parts)
        for name in names:
            _, padding = _size_and_padding(columns[name].nbytes, 1)
            parts += (columns[name].tobytes(), bytes(padding))
        sizes.append(sum(map(len, parts[before:])))
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8), sizes


def _size_and_padding(num_bytes: int, unit: int) -> tuple[int, int]:
    """Return an array's size, and the padding to the next multiple of the alignment, in units of `unit` bytes."""
    return num_bytes // unit, -num_bytes % ALIGNED_BYTES // unit
