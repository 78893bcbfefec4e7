"""Committing tokens to slots: stops, limits, finished and padding slots."""

import torch

from workers.runner.slot_table import SlotTable
from workers.scheduling.plan import FINISH_LENGTH, FINISH_STOP, SamplingParams, SlotInit, StepPlan, pack_i32

CPU = torch.device("cpu")


def table(*limits: int) -> SlotTable:
    """Slots with 10 committed tokens, stop token 9 and these limits on prompt and output together."""
    slots = SlotTable(len(limits), 4, 16, CPU)
    sampling = SamplingParams(100, 0.0, stop_token_ids=(9,))
    inits = tuple(SlotInit(i, 10, 5, limit, sampling) for i, limit in enumerate(limits))
    slots.apply_plan(StepPlan(0, 0, b"", 0, 0, page_updates=pack_i32([0, 1, 7, 1, 0, 3]), inits=inits))
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
    slots.apply_plan(StepPlan(0, 1, b"", 0, 0, page_updates=pack_i32([0, 0, 2]), inits=(init,)))
    assert slots.page_table[:2].tolist() == [[2, 0, 0, 0], [3, 0, 0, 0]]


def test_seeds_keep_all_64_bits() -> None:
    slots = SlotTable(1, 1, 16, CPU)
    slots._init_slot(SlotInit(0, 0, 1, 2, SamplingParams(1, seed=(1 << 64) - 5)))
    assert slots.seed[0] == -5
