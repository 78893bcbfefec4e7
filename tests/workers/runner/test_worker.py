"""A rank's plan as tensors: what the strategy is given, and how it got to the device."""

import time

import numpy as np
import pytest
import torch

from aerie.workers import slots as slots_module
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.runner.batch import StepBatch, StepTensors
from aerie.workers.runner.decoding import FillMasks
from aerie.workers.runner.worker import Worker
from aerie.workers.scheduling.plan import Chunk, SamplingParams, SlotInit, StepPlan, pack_i32
from aerie.workers.slots import SlotTable
from aerie.workers.slots import upload as upload_columns
from tests.support.kernels import strict_device
from tests.support.slots import apply_plan

CPU = torch.device("cpu")
SHAPING = SamplingParams(9, 0.7, presence_penalty=0.5, logit_bias={4: 2.0}, stop_token_ids=(3, 8), seed=(1 << 64) - 5)


class Listening:
    """A strategy that keeps its batches and emits one token for each entry."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.batches: list[StepBatch] = []

    def step(self, batch: StepBatch, fill_masks: FillMasks | None = None) -> StepTensors:
        self.batches.append(batch)
        count = batch.num_requests + (batch.chunks.num_finals if batch.chunks is not None else 0)
        ones = torch.ones(count, dtype=torch.int64, device=self._device)
        return StepTensors(ones.unsqueeze(1), ones, torch.zeros_like(ones), -ones, None)


def worker(device: torch.device) -> tuple[Worker, Listening, SlotTable]:
    strategy, slots = Listening(device), SlotTable(6, 4, 32, device)
    return Worker(strategy, slots, TPGroup(0, 1), debug=False), strategy, slots  # type: ignore[arg-type]


def first_plan() -> StepPlan:
    """Two requests enter; one ends its prompt, the other does not."""
    return StepPlan(
        epoch=0,
        step=0,
        slots=pack_i32([]),
        shape=0,
        max_kv_len=20,
        next_shape=1,
        drafting=b"\1",
        page_updates=pack_i32([4, 0, 7, 4, 1, 8, 2, 0, 9]),
        inits=(
            SlotInit(4, 5, 7, 16, SHAPING, pack_i32([1, 2, 2]), pack_i32([6])),
            SlotInit(2, 0, 9, 12, SamplingParams(3, 0.0, min_tokens=2)),
        ),
        chunks=(Chunk(2, 0, pack_i32([11, 12, 13]), 14), Chunk(4, 5, pack_i32([21, 22]), -1)),
    )


def later_plan(step: int) -> StepPlan:
    """A round of the one beside more of the other's prompt."""
    return StepPlan(
        0, step, pack_i32([4]), 1, 20, next_shape=1, drafting=b"\0", chunks=(Chunk(2, 3, pack_i32([14]), 15),)
    )


def test_strategy_gets_what_the_plan_says() -> None:
    rank, strategy, slots = worker(CPU)
    rank.submit(first_plan())
    batch = strategy.batches[0]
    chunks = batch.chunks
    assert chunks is not None
    assert batch.slots.tolist() == [] and batch.draft_slots.tolist() == [4]
    assert chunks.ids.tolist() == [21, 22, 11, 12, 13]  # those that end their prompts first
    assert chunks.next_ids.tolist() == [-1, 14]
    assert chunks.final_slots.tolist() == [4] and chunks.final_lengths.tolist() == [6]
    assert chunks.batch.qo_indptr.tolist() == [0, 2, 5] and chunks.batch.starts.tolist() == [5, 0]
    assert chunks.batch.page_table[:, :2].tolist() == [[7, 8], [9, 0]]
    assert chunks.batch.num_rows == 5 and chunks.batch.lists == chunks.batch.host_lists
    kinds = [chunks.final_lengths, chunks.batch.qo_indptr, chunks.batch.starts, chunks.batch.page_table]
    assert {tensor.dtype for tensor in kinds} == {torch.int32}
    assert slots.seq_len[[2, 4]].tolist() == [0, 5] and slots.max_len[[2, 4]].tolist() == [12, 16]
    assert slots.min_len[[2, 4]].tolist() == [11, 7] and slots.commit_tables.seed[4] == -5
    assert slots.stop_ids[4, :3].tolist() == [3, 8, -1] and slots.finished.tolist() == [1, 1, 0, 1, 0, 1, 1]
    assert slots.shapes_logits.tolist() == [0, 0, 1, 0, 1, 0, 0] and slots.filters.temperature[
        4
    ].item() == pytest.approx(0.7)
    assert slots.output_counts[4, 6] == 1 and slots.in_prompt[4].nonzero().flatten().tolist() == [1, 2]
    assert slots.bias[4, 4] == 2.0


def test_slots_that_stay_the_same_are_the_same_tensor() -> None:
    """Captured steps copy them no second time."""
    rank, strategy, _ = worker(CPU)
    rank.submit(first_plan())
    for step in (1, 2):
        rank.take()
        rank.submit(later_plan(step))
    before, after = strategy.batches[1:]
    assert before.slots is after.slots and before.slots.tolist() == [4]
    assert before.draft_slots is after.draft_slots and before.draft_slots.tolist() == [6]  # the padding slot


def test_a_plan_is_one_copy_and_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, strategy, _ = worker(strict_device.DEVICE)
    with strict_device.strict_device(monkeypatch, slots_module) as copied:
        rank._batches.build(first_plan(), (4,), {})
        assert len(copied) == 1
        rank._batches.build(later_plan(1), (4,), {})
        assert len(copied) == 2
        rank._batches.build(StepPlan(0, 2, pack_i32([4]), 1, 20, next_shape=1, drafting=b"\0"), (4,), {})
        assert len(copied) == 2  # a round of the same requests brings nothing


@pytest.mark.parametrize("device", [CPU, torch.device("cuda")], ids=str)
def test_columns_keep_shape_type_and_alignment(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent to a GPU, looked at on its way there; on a CPU the same without a copy."""
    monkeypatch.setattr(slots_module, "to_device", lambda host, device: host)
    columns = {
        "none": np.zeros(0, np.int32),
        "flags": np.array([True, False, True]),
        "strided": np.arange(10, dtype=np.int32)[::2],
        "floats": np.array([[1.5, 2.5], [3.5, 4.5]], np.float32),
        "numbers": np.array([-(2**62), 7, 9]),
        "more numbers": np.array([[5], [6]]),
    }
    sent = upload_columns(columns, device)
    begin = min(tensor.data_ptr() for tensor in sent.values() if tensor.numel())
    for name, array in columns.items():
        assert sent[name].shape == array.shape and sent[name].numpy().dtype == array.dtype
        assert sent[name].tolist() == array.tolist()
        assert device == CPU or not array.size or (sent[name].data_ptr() - begin) % 16 == 0


def test_nothing_to_send_is_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, _, slots = worker(strict_device.DEVICE)
    with strict_device.strict_device(monkeypatch, slots_module) as copied:
        apply_plan(slots, StepPlan(0, 0, b"", 0, 0))
    assert copied == [] and rank.num_pending == 0


class Sleeping(Listening):
    """A strategy whose steps take the given seconds, one after another."""

    def __init__(self, seconds: list[float]) -> None:
        super().__init__(CPU)
        self._seconds = iter(seconds)

    def step(self, batch: StepBatch, fill_masks: FillMasks | None = None) -> StepTensors:
        time.sleep(next(self._seconds))
        return super().step(batch, fill_masks)


def test_a_step_took_its_own_time_whenever_its_result_is_taken() -> None:
    """An engine in this process submits the next step before it takes a result, and a CPU computes it meanwhile."""
    seconds = [0.05, 0.2, 0.05]
    slots = SlotTable(6, 4, 32, CPU)
    rank = Worker(Sleeping(seconds), slots, TPGroup(0, 1), debug=False)  # type: ignore[arg-type]
    rank.submit(first_plan())
    rank.submit(later_plan(1))
    results = [rank.take()]
    rank.submit(later_plan(2))
    results += [rank.take(), rank.take()]
    assert [result.took_s for result in results] == pytest.approx(seconds, abs=0.04)
    assert [result.elapsed_s for result in results] == pytest.approx(seconds, abs=0.04)
