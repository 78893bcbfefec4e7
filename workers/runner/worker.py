"""One tensor-parallel rank: turns plans into batches, runs the strategy's step, turns tensors into results.

Used by the cluster's worker loop and by the local engine; knows no transport.
"""

import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attention.metadata import PrefillBatch, to_device
from workers.distributed.tp_group import TPGroup
from workers.runner.batch import PromptChunks, StepBatch, StepTensors
from workers.runner.decoding import DecodingStrategy
from workers.sampling.sampler import Logprobs, SamplingNeeds
from workers.scheduling.cost_table import CostTable
from workers.scheduling.plan import StepPlan, StepResult, TokenLogprobs, pack_i32, unpack_i32
from workers.slots.slot_table import SlotTable


class RanksDisagreeError(RuntimeError):
    """Two ranks emitted different tokens in a step: a bug, or broken hardware. Raised in debug mode only."""


@dataclass(frozen=True)
class _Emitted:
    """A step's outcome on the host, or on its way there: rows [n, M + 3] int64 of tokens, count, finish, accepted.
    Nothing of it stays on the device, where the next replay of a captured round writes to the same place."""

    rows: Tensor
    logprobs: Logprobs | None
    copied: torch.cuda.Event | None

    @staticmethod
    def of(tensors: StepTensors) -> "_Emitted":
        """On a GPU the copy is only started: nothing waits for it before the result is read, a step later."""
        columns = (tensors.counts, tensors.finish, tensors.accepted)
        rows = torch.cat((tensors.tokens, torch.stack(columns, dim=1)), dim=1)
        if not rows.is_cuda:
            return _Emitted(rows, tensors.logprobs, None)
        logprobs = tensors.logprobs
        if logprobs is not None:
            logprobs = Logprobs(*(_start_copy(t) for t in (logprobs.chosen, logprobs.top_ids, logprobs.top)))
        host = _start_copy(rows)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return _Emitted(host, logprobs, copied)

    def is_here(self) -> bool:
        return self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()


def _start_copy(tensor: Tensor) -> Tensor:
    """A pinned copy on the host, which is there once the stream has come this far."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


@dataclass(frozen=True)
class _Pending:
    plan: StepPlan
    emitted: _Emitted
    num_logprobs: tuple[int, ...]  # per entry of the result, as its request asked; its slot may have a new owner by now
    started_s: float


class _SlotIds:
    """Slot numbers on the device. Most steps run the same requests as the one before, and then copy nothing."""

    def __init__(self, device: torch.device) -> None:
        self._last: tuple[int, ...] = ()
        self._tensor = torch.empty(0, dtype=torch.int64, device=device)

    def on_device(self, slots: tuple[int, ...]) -> Tensor:
        """[n] int64; the same tensor as long as the slots are the same."""
        if slots != self._last:
            self._last = slots
            self._tensor = to_device(torch.tensor(slots, dtype=torch.int64), self._tensor.device)
        return self._tensor


def _entries(plan: StepPlan) -> tuple[int, ...]:
    """The slots that emit tokens, in the order of the step's result."""
    return (*unpack_i32(plan.slots).tolist(), *(chunk.slot for chunk in plan.chunks if chunk.next_token < 0))


class Worker:
    """Implements `workers.runner.executor.StepExecutor`. costs: set once they are measured."""

    def __init__(self, strategy: DecodingStrategy, slots: SlotTable, group: TPGroup, debug: bool) -> None:
        self.costs: CostTable | None = None
        self._strategy = strategy
        self._slots = slots
        self._group = group
        self._debug = debug
        self._pending: deque[_Pending] = deque()
        self._round_slots = _SlotIds(slots.device)
        self._draft_slots = _SlotIds(slots.device)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def ready(self) -> bool:
        return bool(self._pending) and self._pending[0].emitted.is_here()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        assert len(self._pending) < 2, "a third step was submitted before a result was taken"
        started_s = time.perf_counter()
        self._slots.apply_plan(plan)
        entries = _entries(plan)
        tensors = self._strategy.step(self._batch(plan, entries))
        if self._debug:
            self._assert_ranks_agree(tensors)
        num_logprobs = tuple(self._slots.facts[slot].sampling.logprobs for slot in entries)
        self._pending.append(_Pending(plan, _Emitted.of(tensors), num_logprobs, started_s))

    def take(self) -> StepResult:
        pending = self._pending.popleft()
        pending.emitted.wait()
        rows: list[list[int]] = pending.emitted.rows.tolist()
        counts = [row[-3] for row in rows]
        return StepResult(
            epoch=pending.plan.epoch,
            step=pending.plan.step,
            counts=pack_i32(counts),
            tokens=pack_i32([token for row in rows for token in row[: row[-3]]]),
            finish=bytes(row[-2] for row in rows),
            accepted=pack_i32([row[-1] for row in rows]),
            logprobs=self._logprobs(pending, counts),
            elapsed_s=time.perf_counter() - pending.started_s,
        )

    def _batch(self, plan: StepPlan, entries: tuple[int, ...]) -> StepBatch:
        padding = self._slots.padding_slot
        drafting = plan.drafting or bytes(len(entries))
        return StepBatch(
            slots=self._round_slots.on_device(tuple(unpack_i32(plan.slots).tolist())),
            shape=plan.shape,
            next_shape=plan.next_shape,
            draft_slots=self._draft_slots.on_device(
                tuple(slot if drafts else padding for slot, drafts in zip(entries, drafting, strict=True))
            ),
            max_kv_len=plan.max_kv_len,
            chunks=self._chunks(plan) if plan.chunks else None,
            needs=SamplingNeeds.of([self._slots.facts[slot] for slot in entries]),
        )

    def _chunks(self, plan: StepPlan) -> PromptChunks:
        """Those that end their prompt first. Two copies to the device, for which nothing waits."""
        device = self._slots.device
        chunks = sorted(plan.chunks, key=lambda chunk: chunk.next_token >= 0)
        finals = [chunk for chunk in chunks if chunk.next_token < 0]
        ids = [unpack_i32(chunk.tokens) for chunk in chunks]
        counts = [len(tokens) for tokens in ids]
        lengths = [chunk.start + count - 1 for chunk, count in zip(finals, counts, strict=False)]
        columns = (
            np.concatenate(ids),
            [chunk.next_token for chunk in chunks],
            [chunk.slot for chunk in chunks],
            lengths,
        )
        packed = to_device(torch.from_numpy(np.concatenate(columns).astype(np.int64)), device)
        tokens, next_ids, slots, final_lengths = packed.split([len(column) for column in columns])  # type: ignore[no-untyped-call]
        return PromptChunks(
            batch=PrefillBatch.from_lists([c.start for c in chunks], counts, self._slots.page_table[slots]),
            ids=tokens,
            next_ids=next_ids,
            final_slots=slots[: len(finals)],
            final_lengths=final_lengths.int(),
        )

    def _logprobs(self, pending: _Pending, counts: list[int]) -> dict[int, tuple[TokenLogprobs, ...]]:
        tensors = pending.emitted.logprobs
        if tensors is None:
            return {}
        out = {}
        for entry, k in enumerate(pending.num_logprobs):
            if k >= 0:
                count = counts[entry]
                top_ids, top = tensors.top_ids[entry, :count, :k], tensors.top[entry, :count, :k]
                out[entry] = tuple(
                    TokenLogprobs(chosen, tuple(ids), tuple(values))
                    for chosen, ids, values in zip(
                        tensors.chosen[entry, :count].tolist(), top_ids.tolist(), top.tolist(), strict=True
                    )
                )
        return out

    def _assert_ranks_agree(self, tensors: StepTensors) -> None:
        """Compare what this step emitted with the other ranks; costs a gather and a host read, so debug only."""
        mine = torch.cat((_mask_invalid(tensors), tensors.counts.unsqueeze(1), tensors.finish.unsqueeze(1)), dim=1)
        everyone = self._group.all_gather(mine)
        different = (everyone != everyone[0]).flatten(1).any(1)
        if bool(different.any()):
            raise RanksDisagreeError(f"ranks {different.nonzero().flatten().tolist()} emitted other tokens than rank 0")


def _mask_invalid(tensors: StepTensors) -> Tensor:
    column = torch.arange(tensors.tokens.shape[1], device=tensors.tokens.device)
    return torch.where(column < tensors.counts.unsqueeze(1), tensors.tokens, -1)
