"""Converts a plan to a strategy's batch. The plan's arrays go to the device in one copy, and new requests are written
to their slots. Used by `aerie.workers.runner.worker`."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aerie.attention.kv_cache.pool import KVPool
from aerie.attention.recurrent.pool import StatePool
from aerie.workers.distributed.tp_group import SOLO, TPGroup
from aerie.workers.runner.batch import PromptChunks, StepBatch
from aerie.workers.runner.chunk_tensors import chunk_columns, image_values, prompt_chunks, prompt_targets
from aerie.workers.sampling import SamplingNeeds
from aerie.workers.scheduling.plan import Failure, SamplingParams, StepPlan, unpack_i32
from aerie.workers.slots import SlotTable, upload
from aerie.workers.structured_output.slot_grammars import SlotGrammars
from aerie.workers.vision.tower import VisionTower

logger = logging.getLogger(__name__)


def entries_of(plan: StepPlan) -> tuple[int, ...]:
    """Return the slots that emit tokens, in the order of the result's entries."""
    return (*unpack_i32(plan.slots).tolist(), *(chunk.slot for chunk in plan.chunks if chunk.next_token < 0))


class Adapters(Protocol):
    """The part of `aerie.workers.runner.rank_adapters.RankAdapters` that plans need."""

    def place(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy adapters into the layers' tables. pairs: (number, index in the tables)."""


class PlanBatches:
    """Builds the batches of one rank.

    grammars: grammars of the engine's slots; None in engines without grammars.
    pools: KV pools of target and draft.
    states: states of the target's recurrent layers; None without such layers.
    group: the engine's ranks.
    tower: encodes images; None in engines that take none.
    adapters: None in engines without adapters.
    _shifted: slots of requests whose rotary positions are not their token positions (M-RoPE after images).
    """

    def __init__(
        self,
        slots: SlotTable,
        grammars: SlotGrammars | None,
        pools: Sequence[KVPool],
        states: StatePool | None = None,
        group: TPGroup = SOLO,
        tower: VisionTower | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self._slots = slots
        self._adapters = adapters
        self._grammars = grammars
        self._pools = pools
        self._states = states
        self._group = group
        self._tower = tower
        self._round_slots = _SlotIds("round slots", slots.device)
        self._draft_slots = _SlotIds("draft slots", slots.device)
        self._shifted: set[int] = set()

    def build(self, plan: StepPlan, entries: tuple[int, ...], failed: dict[int, Failure]) -> StepBatch:
        """Write the plan's new requests to their slots, and return the batch. Makes at most one copy to the device,
        which is asynchronous. A plan with new requests needs a collective over the group.

        entries: slots that emit tokens, `entries_of(plan)`.
        failed: receives the requests whose parameters raise an error, by number.
        """
        table, padding = self._slots, self._slots.padding_slot
        drafting = plan.drafting or bytes(len(entries))
        rounds = tuple(unpack_i32(plan.slots).tolist())
        drafts = tuple(slot if drafts else padding for slot, drafts in zip(entries, drafting, strict=True))
        columns = {
            **self._entering(plan, failed),
            **self._round_slots.columns(rounds),
            **self._draft_slots.columns(drafts),
            **(self._chunk_columns(plan) if plan.chunks else {}),
            **(_state_columns(plan) if self._states is not None else {}),
        }
        columns |= _page_columns(plan)
        sent = upload(columns, table.device)
        for pool in self._pools:
            _enter_pages(pool, sent)
        table.enter(plan, sent)
        for init in plan.inits:
            (self._shifted.add if init.position_shift else self._shifted.discard)(init.slot)
        round_slots = self._round_slots.on_device(rounds, sent)
        is_shifted = table.always_shifts or (bool(self._shifted) and not self._shifted.isdisjoint(rounds))
        if plan.inits and self._group.size > 1:
            # A request that failed on one rank must emit nothing on any rank, because all ranks must emit the same
            # tokens. NCCL's gather takes about 20 us; the request's prompt takes milliseconds.
            rank_reports = self._group.all_gather(sent["failed inits"])
            table.finished[sent["init slots"]] = rank_reports.any(0)
        if self._states is not None:
            _enter_states(self._states, sent)
        if self._grammars is not None:
            self._grammars.enter(plan)
        if self._adapters is not None and plan.placed_adapters:
            numbers, indices = unpack_i32(plan.placed_adapters).reshape(-1, 2).T.tolist()
            self._adapters.place(list(zip(numbers, indices, strict=True)))
        for encoding in plan.encodings:
            assert self._tower is not None
            self._tower.advance(encoding)
        running = {*entries, *(chunk.slot for chunk in plan.chunks)}
        return StepBatch(
            slots=round_slots,
            shape=plan.shape,
            next_shape=plan.next_shape,
            draft_slots=self._draft_slots.on_device(drafts, sent),
            max_kv_len=plan.max_kv_len,
            chunks=self._chunks(plan, sent) if plan.chunks else None,
            needs=SamplingNeeds.of([table.facts[slot] for slot in entries]),
            prompt_targets=prompt_targets(plan, sent),
            is_shifted=is_shifted,
            shift_is_captured=table.always_shifts,
            adapted=self._adapters is not None and any(table.facts[slot].is_adapted for slot in running),
        )

    def _chunk_columns(self, plan: StepPlan) -> dict[str, npt.NDArray[Any]]:
        within_images = self._tower is not None and self._tower.whole
        # with all axes in every step, captured steps have the inputs of eager ones
        return chunk_columns(plan, self._states is not None, within_images, self._slots.num_axes)

    def _chunks(self, plan: StepPlan, sent: Mapping[str, Tensor]) -> PromptChunks:
        images = image_values(plan, self._tower)
        return prompt_chunks(plan, sent, self._slots.page_table, self._states is not None, images)

    def _entering(self, plan: StepPlan, failed: dict[int, Failure]) -> dict[str, npt.NDArray[Any]]:
        """Return the plan's new requests and pages as columns for the device. A request whose parameters raise an error
        is added to `failed` and gets default parameters."""
        columns = self._columns(plan, failed)
        if plan.inits and self._group.size > 1:
            columns["failed inits"] = np.array([init.number in failed for init in plan.inits], np.int32)
        return columns

    def _columns(self, plan: StepPlan, failed: dict[int, Failure]) -> dict[str, npt.NDArray[Any]]:
        """Return the slot columns of a plan. If they cannot be computed, find the requests at fault and let only these
        fail."""
        try:
            return self._slots.columns(plan)
        except Exception:
            logger.exception("could not convert the new requests of a plan; each is tried alone")
        inits = []
        for init in plan.inits:
            try:
                self._slots.columns(StepPlan(plan.epoch, plan.step, b"", 0, 0, inits=(init,)))
            except Exception as error:
                failed[init.number] = Failure(f"its parameters failed: {type(error).__name__}: {error}")
                init = msgspec.structs.replace(init, sampling=SamplingParams(init.sampling.max_tokens))
            inits.append(init)
        return self._slots.columns(msgspec.structs.replace(plan, inits=tuple(inits)))


def _page_columns(plan: StepPlan) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays that `_enter_pages` needs: pages to zero, and window pages to attach."""
    columns: dict[str, npt.NDArray[Any]] = {}
    if plan.cleared_pages:
        columns["cleared pages"] = unpack_i32(plan.cleared_pages).astype(np.int64)
    if plan.cleared_window_pages:
        columns["cleared window pages"] = unpack_i32(plan.cleared_window_pages).astype(np.int64)
    if plan.window_updates:
        pages, window_pages = unpack_i32(plan.window_updates).reshape(-1, 2).T.copy()
        columns |= {"windowed pages": pages.astype(np.int64), "window pages": window_pages}
    return columns


def _enter_pages(pool: KVPool, columns: Mapping[str, Tensor]) -> None:
    """Zero and attach pages of a pool, before the plan's pass."""
    if "cleared pages" in columns:
        pool.clear(columns["cleared pages"])
    if "cleared window pages" in columns:
        pool.clear(columns["cleared window pages"], in_windows=True)
    if "window pages" in columns and pool.window_layers:
        pool.attach(columns["windowed pages"], columns["window pages"])


def _state_columns(plan: StepPlan) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays that `_enter_states` needs besides the new slots: snapshots to resume from, and states to save
    in rounds."""
    columns: dict[str, npt.NDArray[Any]] = {}
    resumed = [(init.state_row, init.slot) for init in plan.inits if init.state_row >= 0]
    if resumed:
        columns["resumed rows"], columns["resumed slots"] = np.array(resumed, np.int64).T.copy()
    if plan.saved_states:
        saved = unpack_i32(plan.saved_states).reshape(-1, 3)
        saved = saved[~np.isin(saved[:, 0], [chunk.slot for chunk in plan.chunks])]
        if len(saved):
            slots, positions, rows = saved.T
            columns |= {"saving slots": slots.astype(np.int64), "saved positions": positions.copy()}
            columns["saved rows"] = rows.astype(np.int64)
    return columns


def _enter_states(states: StatePool, columns: Mapping[str, Tensor]) -> None:
    """Reset states, restore snapshots, and request snapshots. Must run before the plan's pass, which may overwrite a
    snapshot that is restored here."""
    if "init slots" in columns:
        states.enter(columns["init slots"])
    if "resumed slots" in columns:
        states.restore(columns["resumed rows"], columns["resumed slots"])
    if "saving slots" in columns:
        states.save(columns["saving slots"], columns["saved positions"], columns["saved rows"])


class _SlotIds:
    """Cached slot numbers on the device, because most steps run the same requests as the previous step."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._name = name
        self._last: tuple[int, ...] = ()
        self._tensor = torch.empty(0, dtype=torch.int64, device=device)

    def columns(self, slots: tuple[int, ...]) -> dict[str, npt.NDArray[Any]]:
        """Return the array that `on_device` needs; empty if the slots are cached."""
        return {} if slots == self._last else {self._name: np.array(slots, np.int64)}

    def on_device(self, slots: tuple[int, ...], columns: Mapping[str, Tensor]) -> Tensor:
        """Return the slots as [n] int64, the same tensor as long as they do not change."""
        if slots != self._last:
            self._last = slots
            self._tensor = columns[self._name]
        return self._tensor
