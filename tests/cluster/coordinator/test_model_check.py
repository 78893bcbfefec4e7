"""The engine's health after NaN logits: unchanged if one request had them, a fault if all have them."""

import msgspec
import numpy as np
import pytest

from aerie.cluster.coordinator.worker_links import FAULT
from aerie.kernels.slots.finish import FINISH_NOT_FINITE
from aerie.workers.scheduling.plan import NOT_FINITE, StepResult, pack_i32, unpack_i32
from tests.support.cluster import Ranks, TestBed, until


def breaks(ranks: Ranks, lengths: set[int]) -> None:
    """From now on the logits after prompts of these lengths are NaN, on all ranks; after all, if there are none."""
    for executor in ranks.executors:
        take, submit, plans = executor.take, executor.submit, []

        def remember(plan, submit=submit, plans=plans) -> None:  # type: ignore[no-untyped-def]
            plans.append(plan)
            submit(plan)

        def broken(take=take, plans=plans) -> StepResult:  # type: ignore[no-untyped-def]
            result, plan = take(), plans.pop(0)
            finals = [chunk for chunk in plan.chunks if chunk.next_token < 0]
            first = len(result.finish) - len(finals)
            hurt = [
                first + i
                for i, chunk in enumerate(finals)
                if not lengths or chunk.start + len(chunk.tokens) // 4 in lengths
            ]
            finish, counts = bytearray(result.finish), unpack_i32(result.counts).copy()
            parts = np.split(unpack_i32(result.tokens), counts.cumsum()[:-1])
            kept = [token for i, part in enumerate(parts) if i not in hurt for token in part.tolist()]
            for entry in hurt:
                finish[entry], counts[entry] = FINISH_NOT_FINITE, 0
            failed = dict.fromkeys(hurt, NOT_FINITE)
            return msgspec.structs.replace(
                result, finish=bytes(finish), counts=pack_i32(counts), tokens=pack_i32(kept), failed=failed
            )

        executor.submit, executor.take = remember, broken  # type: ignore[method-assign]


@pytest.fixture
def bed(make_bed) -> TestBed:  # type: ignore[no-untyped-def]
    return make_bed()


def told(bed: TestBed) -> str:
    return bed.coordinator._loop._fault()  # type: ignore[attr-defined]


def test_one_request_of_nan_is_no_fault_of_the_engine(bed: TestBed) -> None:
    ranks = bed.new_ranks()
    breaks(ranks, {5})
    bed.coordinator.attach(ranks.start().endpoints, 1)
    bed.generate("well", prompt_len=12, max_tokens=40)
    bed.generate("odd", prompt_len=5)
    assert bed.ingress.read_end("odd").error == NOT_FINITE.message
    assert bed.ingress.read_end("well").finish == "length"
    until(lambda: bed.scheduler.stats.finished["length"] == 2)  # its own one, too
    assert told(bed) == ""


def test_a_model_that_gives_nan_alone_is_told_until_it_does_not(bed: TestBed) -> None:
    ranks = bed.new_ranks()
    breaks(ranks, set())
    bed.coordinator.attach(ranks.start().endpoints, 1)
    bed.generate("q", prompt_len=7)
    assert bed.ingress.read_end("q").error == NOT_FINITE.message
    until(lambda: told(bed) == FAULT)
    bed.attach(epoch=2)  # with weights that are loaded anew
    assert told(bed) == ""
    bed.generate("r", prompt_len=7, max_tokens=3)
    assert bed.ingress.read_end("r").finish == "length"
