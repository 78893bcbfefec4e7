"""Committing tokens to slots: stops, limits, finished and padding slots."""

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from aerie.attention.config import CacheConfig
from aerie.attention.kv_cache.layout import HeadsLayout, LayerGroup
from aerie.attention.kv_cache.pool import bytes_per_page
from aerie.kernels.slots.finish import FINISH_LENGTH, FINISH_STOP
from aerie.workers import slots as slots_module
from aerie.workers.config import RoundShapes, SchedulerConfig
from aerie.workers.engine_layout import EngineLayout, PageCounts, pages_asked
from aerie.workers.scheduling.plan import SamplingParams, SlotInit, StepPlan, pack_i32
from aerie.workers.slots import SlotTable
from tests.support.kernels import strict_device
from tests.support.kernels.gpu_waits import refuse_gpu_waits
from tests.support.slots import apply_plan, enter

CPU = torch.device("cpu")


def table(*limits: int) -> SlotTable:
    """Slots with 10 committed tokens, stop token 9 and these limits on prompt and output together."""
    slots = SlotTable(len(limits), 4, 16, CPU)
    sampling = SamplingParams(100, 0.0, stop_token_ids=(9,))
    inits = tuple(SlotInit(i, 10, 5, limit, sampling) for i, limit in enumerate(limits))
    apply_plan(slots, StepPlan(0, 0, b"", 0, 0, page_updates=pack_i32([0, 1, 7, 1, 0, 3]), inits=inits))
    return slots


def test_a_commit_stops_at_the_first_stop_token_and_at_the_limit() -> None:
    slots = table(100, 100, 13, 13, 100)
    tokens = torch.tensor([[1, 2, 3, 4], [1, 9, 9, 4], [1, 2, 3, 4], [1, 9, 3, 4], [9, 2, 3, 4]])
    commit = slots.commit(torch.arange(5), tokens, torch.tensor([4, 4, 4, 4, 1]))
    assert commit.counts.tolist() == [4, 2, 2, 2, 1]
    assert commit.finish.tolist() == [0, FINISH_STOP, FINISH_LENGTH, FINISH_STOP, FINISH_STOP]
    assert slots.seq_len[:5].tolist() == [14, 12, 12, 12, 11]
    assert slots.bonus[:5].tolist() == [4, 9, 2, 9, 9]


def test_a_stop_token_behind_the_accepted_run_does_not_stop() -> None:
    slots = table(100)
    commit = slots.commit(torch.tensor([0]), torch.tensor([[1, 2, 9]]), torch.tensor([2]))
    assert commit.counts.tolist() == [2] and commit.finish.tolist() == [0]


def test_finished_and_padding_slots_emit_nothing() -> None:
    slots = table(100)
    slots.commit(torch.tensor([0]), torch.tensor([[9]]), torch.tensor([1]))
    both = torch.tensor([0, slots.padding_slot])
    commit = slots.commit(both, torch.tensor([[1], [1]]), torch.tensor([1, 1]))
    assert commit.counts.tolist() == [0, 0] and commit.finish.tolist() == [0, 0]
    assert slots.seq_len[0] == 11 and slots.bonus[0] == 9


def test_a_new_owner_does_not_inherit_pages() -> None:
    slots = table(100, 100)
    assert slots.page_table[:2].tolist() == [[0, 7, 0, 0], [3, 0, 0, 0]]
    init = SlotInit(0, 0, 5, 50, SamplingParams(1))
    apply_plan(slots, StepPlan(0, 1, b"", 0, 0, page_updates=pack_i32([0, 0, 2]), inits=(init,)))
    assert slots.page_table[:2].tolist() == [[2, 0, 0, 0], [3, 0, 0, 0]]


def test_seeds_keep_all_64_bits() -> None:
    slots = SlotTable(1, 1, 16, CPU)
    enter(slots, SlotInit(0, 0, 1, 2, SamplingParams(1, seed=(1 << 64) - 5)))
    assert slots.commit_tables.seed[0] == -5


COUNTED = SamplingParams(
    9,
    0.0,
    presence_penalty=0.5,
    repetition_penalty=1.2,
    logit_bias={4: 2.0, 15: -100.0},
    min_tokens=2,
    stop_token_ids=(3,),
)


def counted_init(slot: int, prompt: list[int], output: list[int]) -> SlotInit:
    return SlotInit(slot, 0, 5, 14, COUNTED, pack_i32(prompt), pack_i32(output))


def test_what_shapes_logits_is_counted() -> None:
    """Prompts and outputs with and without repeated tokens, in slots that other requests used before."""
    slots = SlotTable(3, 4, 16, CPU)
    for prompt, output in (([1, 2, 2, 15], [2, 3, 3, 3, 0]), ([7], []), ([], [15, 15])):
        apply_plan(slots, StepPlan(0, 0, b"", 0, 0, inits=(counted_init(1, prompt, output),)))
        assert slots.output_counts[1].tolist() == [output.count(token) for token in range(16)]
        assert slots.in_prompt[1].tolist() == [token in prompt for token in range(16)]
        assert slots.bias[1].tolist() == [COUNTED.logit_bias.get(token, 0.0) for token in range(16)]
    apply_plan(slots, StepPlan(0, 1, b"", 0, 0, inits=(SlotInit(0, 0, 5, 9, replace(COUNTED, logit_bias={})),)))
    assert not slots.output_counts[0].any() and not slots.in_prompt[0].any() and not slots.bias[0].any()


def test_requests_that_need_counts_are_admitted_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read back and every copy goes through pinned memory; a row of the vocabulary is never sent."""
    vocab = 128256
    slots = SlotTable(4, 8, vocab, strict_device.DEVICE)
    inits = tuple(counted_init(slot, list(range(100)), [5] * 40) for slot in range(3))
    plan = StepPlan(0, 0, b"", 0, 0, page_updates=pack_i32([0, 1, 7, 1, 0, 3]), inits=inits)
    with strict_device.strict_device(monkeypatch, slots_module) as copied:
        apply_plan(slots, plan)
    assert len(copied) == 1 and copied[0] < 3 * 4096


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11
def test_a_gpu_is_not_waited_for_when_such_requests_are_admitted() -> None:
    """torch raises at every synchronising operation and blocking copy, and the profiler sees no call that waits."""
    device = torch.device("cuda")
    slots = SlotTable(4, 8, 128256, device)
    inits = tuple(counted_init(slot, list(range(100)), [5] * 40) for slot in range(3))
    plan = StepPlan(0, 0, b"", 0, 0, page_updates=pack_i32([0, 1, 7, 1, 0, 3]), inits=inits)
    apply_plan(slots, plan)  # allocates and loads kernels
    torch.cuda.synchronize()
    activities = list(torch.profiler.supported_activities())
    with torch.profiler.profile(activities=activities) as profile, refuse_gpu_waits():
        apply_plan(slots, plan)
    # the profiler's own end synchronises the device
    names = [event.key for event in profile.key_averages()]
    assert "cudaStreamSynchronize" not in names and "cudaMemcpy" not in names
    assert "cudaMemcpyAsync" in names
    assert slots.output_counts[1, 5].item() == 40


def test_the_strict_device_sees_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    table, mask = (torch.zeros(8, dtype=kind, device=strict_device.DEVICE) for kind in (torch.int64, torch.bool))
    waits = {
        "bincount": lambda: torch.bincount(table, minlength=9),
        "item": lambda: table[0].item(),
        "mask": lambda: table[mask],
        "masked write": lambda: table.__setitem__(mask, 1),
        "number for an element": lambda: table.__setitem__(2, 5),
        "number at an index": lambda: table.__setitem__(table, 5),
        "copy in": lambda: table.copy_(torch.ones(8, dtype=torch.int64)),
        "copy across": lambda: torch.ones(8).to(strict_device.DEVICE),
        "tensor": lambda: torch.tensor([1, 2], device=strict_device.DEVICE),
    }
    for name, wait in waits.items():
        with strict_device.strict_device(monkeypatch), pytest.raises(strict_device.WouldWaitError):
            wait()
            pytest.fail(name)
    with strict_device.strict_device(monkeypatch):
        table[2:4] = 5
        table.index_fill_(0, table, 5)
        table[table] = table + 1


def test_tables_count_against_the_memory_plan() -> None:
    """What a table on the meta device says is what the same one takes, and pages get the rest of memory_gb."""
    small, large = (SlotTable(n, 7, 1000, strict_device.DEVICE).num_bytes for n in (3, 100))
    table = SlotTable(3, 7, 1000, CPU)
    tensors = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in vars(table).values()
        if isinstance(t, torch.Tensor)
    }
    assert small == table.num_bytes == sum(tensors.values())
    assert large > small > 4 * 1000 * (4 + 1 + 4)
    groups = [LayerGroup((0, 1), HeadsLayout(2, 16, torch.float32))]
    per_page = bytes_per_page(groups, 16)

    def asked(slot_bytes: int, **cache: Any) -> PageCounts | None:
        return pages_asked(
            EngineLayout(RoundShapes(), SchedulerConfig(3), CacheConfig(**cache), 9, 9, 0, per_page), slot_bytes
        )

    memory_gb = (50.5 * per_page + small) / 1e9
    assert asked(small, memory_gb=memory_gb) == (49, 0)
    assert asked(small + 10 * per_page, memory_gb=memory_gb) == (39, 0)
    assert asked(10**12, num_pages=5) == (5, 0)
    assert asked(10**12) is None
    with pytest.raises(ValueError, match="tables for scheduler.max_running; give at least .*, or auto"):
        asked(10**12, memory_gb=memory_gb)
