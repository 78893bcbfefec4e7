"""A rank's host work for one request of a step fails: that request ends with the reason, and other requests with the
same parameters do not change."""

import functools
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import aerie.workers.runner.worker as step_result
from aerie.speculative.build import local_engine
from aerie.workers import slots
from aerie.workers.config import WorkerConfig
from aerie.workers.runner import local_engine as local_engine_module
from aerie.workers.runner.layout import EnginePlan
from aerie.workers.runner.worker import Worker
from aerie.workers.scheduling.plan import SamplingParams, StepResult, unpack_i32
from aerie.workers.scheduling.request import FinishReason, Request, RequestOutput
from tests.speculative.conftest import Pair
from tests.support.simulation.integrity import check_queues
from tests.support.slow import slow

GUEST = SamplingParams(12, 0.0, logprobs=7, prompt_logprobs=7, frequency_penalty=0.7)
OTHERS = SamplingParams(12, 0.0, logprobs=2, prompt_logprobs=2, frequency_penalty=0.2)
# by what fails: the module and function that do it, and which of its arguments say for whom
PARTS: dict[str, tuple[Any, str, Any, str]] = {
    "log-probabilities": (step_result, "_token_logprobs", lambda *given: given[3] == 7, "its log-probabilities failed"),
    "scores of a prompt": (
        step_result,
        "_scores_of",
        lambda chunk, *_: chunk.logprobs == 7,
        "its prompt's log-probabilities failed",
    ),
    "penalties": (
        slots,
        "_shaping_arrays",
        lambda init: init.sampling.logprobs == 7,
        "its parameters failed",
    ),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_fault_for_one_request_ends_that_one_alone(pair: Pair, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    module, function, is_guest, reason = PARTS[part]
    original = getattr(module, function)

    def raising(*given: Any) -> Any:
        if is_guest(*given):
            raise ZeroDivisionError("a bug")
        return original(*given)

    with local_engine(pair.spec(pair.chain())) as engine:

        def run(names: str) -> dict[str, list[RequestOutput]]:
            kinds = [GUEST if i == 3 else OTHERS for i in range(8)]
            requests = [Request(f"{names}{i}", pair.prompts[i], kind) for i, kind in enumerate(kinds)]
            outputs: dict[str, list[RequestOutput]] = {}
            engine.run(requests, 6, lambda o: outputs.setdefault(o.request.request_id[-1], []).append(o))
            return outputs

        undisturbed = run("a")
        monkeypatch.setattr(module, function, raising)
        disturbed = run("b")
        assert engine.scheduler.kv_usage == 0
        check_queues(engine.scheduler.queues)
    last = disturbed.pop("3")[-1]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error == f"{reason}: ZeroDivisionError: a bug"
    assert undisturbed.pop("3")[-1].finish_reason is not FinishReason.ERROR
    for name, outputs in disturbed.items():
        before = undisturbed[name]
        assert outputs[-1].request.output == before[-1].request.output and outputs[-1].error is None
        for kind in ("logprobs", "prompt_logprobs"):
            assert _joined(outputs, kind) == _joined(before, kind) != []


# by what fails on one of two ranks: who wants it
GUESTS = {
    "log-probabilities": SamplingParams(12, 0.0, logprobs=5),
    "scores of a prompt": SamplingParams(12, 0.0, prompt_logprobs=6),
    "penalties": SamplingParams(12, 0.0, min_tokens=7, frequency_penalty=0.7),
}
_IS_GUEST = {
    "log-probabilities": lambda *given: given[3] == 5,
    "scores of a prompt": lambda chunk, *_: chunk.logprobs == 6,
    "penalties": lambda init: init.sampling.min_tokens == 7,
}
_run_rank = local_engine_module.run_rank


def _faulty_rank(
    faulty: int, worker: WorkerConfig, plan: EnginePlan, rank: int, address: str, pipe: Connection
) -> None:
    """A rank that compares its slots and pages with the other's after every step. On rank `faulty`, host work for each
    of `GUESTS` raises."""
    take = Worker.take

    def checked(self: Worker) -> StepResult:
        table, result = self._slots, take(self)
        columns = (table.page_table, table.seq_len.unsqueeze(1), table.finished.unsqueeze(1), table.bonus.unsqueeze(1))
        everyone = self._group.all_gather(torch.cat([column.int() for column in columns], 1))
        assert torch.equal(everyone[0], everyone[1]), "slots or pages of the ranks differ"
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "take", checked)
        for part, (module, function, _, _) in PARTS.items():
            original = getattr(module, function)

            def raising(*given: Any, original: Any = original, part: str = part) -> Any:
                if _IS_GUEST[part](*given):
                    raise ZeroDivisionError("a bug")
                return original(*given)

            if rank == faulty:
                patch.setattr(module, function, raising)
        _run_rank(worker, plan, rank, address, pipe)


@pytest.mark.parametrize("faulty", [1, *slow(0)])
def test_a_fault_on_one_of_two_ranks_ends_that_request_alone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, faulty: int
) -> None:
    """Only rank 0's log-probabilities are used; what a rank does with parameters decides what it computes."""
    monkeypatch.setattr(local_engine_module, "run_rank", functools.partial(_faulty_rank, faulty))
    with local_engine(pair.spec(pair.chain(adaptive=False), tensor_parallel=2)) as engine:

        def run(guests: dict[int, SamplingParams]) -> dict[int, RequestOutput]:
            prompts = pair.prompts[: 4 + len(guests)]
            requests = [Request(str(i), prompt, guests.get(i, OTHERS)) for i, prompt in enumerate(prompts)]
            last: dict[int, RequestOutput] = {}
            engine.run(requests, 6, lambda o: last.__setitem__(int(o.request.request_id), o))
            assert engine.scheduler.kv_usage == 0
            check_queues(engine.scheduler.queues)
            return last

        undisturbed = run({})
        guests = dict(zip((4, 5, 6), GUESTS.values(), strict=True))
        disturbed = run(guests)
        again = run({})
    for number, (part, (_, _, _, reason)) in enumerate(PARTS.items(), 4):
        end = disturbed[number]
        if faulty == 0:
            assert end.error == f"{reason}: ZeroDivisionError: a bug", part
        elif part == "penalties":
            assert end.error == "its parameters failed on another rank", part
        else:
            assert end.finish_reason is not FinishReason.ERROR and len(end.request.output) == 12, part
    for runs in (disturbed, again):
        for number, end in undisturbed.items():
            assert runs[number].request.output == end.request.output and runs[number].error is None


def _joined(outputs: list[RequestOutput], kind: str) -> list[int]:
    """The likeliest tokens of each place."""
    found: list[int] = []
    for output in outputs:
        if kind == "logprobs":
            found += [token for each in output.logprobs or () for token in each.top_ids]
        elif output.prompt_logprobs is not None:
            found += unpack_i32(output.prompt_logprobs.top_ids).tolist()
    return found
