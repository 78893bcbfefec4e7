"""The processes that fill masks may end at any time, and be late on one rank alone: answers stay what they were."""

import json

import pytest
import torch

from speculative.local import local_engine
from tests.support.embedded import CHAIN, embedded_spec
from tests.support.hostile_grammars import STOPS
from tests.support.prompts import held_out_prompts, tokenized
from tests.support.thread_group import on_ranks
from workers.distributed.tp_group import TPGroup
from workers.ops.sampling.masks import FREE
from workers.runner.worker import Worker
from workers.scheduling.plan import Grammar, SamplingParams
from workers.scheduling.request import Request
from workers.structured_output.guide_table import NOWHERE
from workers.structured_output.mask_table import HELD, MaskTable
from workers.structured_output.slot_grammars import SlotGrammars

PROMPTS = tokenized(held_out_prompts(4))
GRAMMARS = (
    Grammar("regex", "[a-z ]{20,30}", STOPS),
    Grammar("choice", json.dumps(["да, конечно", "нет, никогда"]), STOPS),
    Grammar("regex", "([A-Z][a-z]+ ){3}", STOPS),
)


def _asked() -> list[Request]:
    found = [
        Request(f"r{i}", PROMPTS[i], SamplingParams(24, 0.8, seed=i, stop_token_ids=STOPS, grammar=grammar))
        for i, grammar in enumerate(GRAMMARS)
    ]
    return [*found, Request("free", PROMPTS[3], SamplingParams(24, 0.0))]


def test_answers_are_the_same_though_the_process_is_killed_again_and_again() -> None:
    torch.set_num_threads(1)
    with local_engine(embedded_spec(CHAIN)) as engine:
        undisturbed, disturbed = _asked(), _asked()
        engine.run(undisturbed, 4)
        worker = engine.executor
        assert isinstance(worker, Worker) and worker._grammars is not None
        link = worker._grammars._link
        for request in disturbed:
            engine.scheduler.submit(request)
        num_unfinished, num_steps, first = len(disturbed), 0, link.generation
        while num_unfinished:
            num_steps += 1
            if num_steps % 4 == 0:
                link.lost("killed by a test")
            num_unfinished -= sum(output.finish_reason is not None for output in engine.step())
    assert [request.output for request in disturbed] == [request.output for request in undisturbed]
    assert link.generation > first


@pytest.mark.parametrize("late", [0, 1])
def test_what_one_rank_holds_all_hold(late: int) -> None:
    """Slot 1 is late on one rank, slot 2 has another guide there."""

    def of_rank(group: TPGroup) -> tuple[list[bool], list[int], list[int]]:
        masks = MaskTable(4, 4, 64, torch.device("cpu"))
        grammars = SlotGrammars("", 64, masks)
        assert masks.guides is not None
        masks.index[:4] = torch.tensor([0, 4, 8, FREE])
        masks.guides.index[:3] = torch.tensor([0, 1, 2])
        masks.guides.blocks.zero_()
        if group.rank == late:
            masks.index[1] = HELD
            masks.guides.blocks[2] += 1
        finished = torch.tensor([False, False, False, True, True])
        grammars.agree(group, finished)
        return finished.tolist(), masks.index.tolist(), masks.guides.index.tolist()

    for finished, index, guides in on_ranks(2, of_rank):
        assert finished == [False, True, False, True, True]
        assert index == [0, FREE, 8, FREE, FREE]
        assert guides[0] == 0 and guides[2] == NOWHERE
