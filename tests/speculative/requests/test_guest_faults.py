"""A rank's host work for one request of a step fails: that request ends with the reason, and other requests with the
same parameters do not change."""

from typing import Any

import pytest

import workers.runner.step_result as step_result
from speculative.local import local_engine
from tests.speculative.conftest import Pair
from tests.support.simulation.integrity import check_queues
from workers.scheduling.plan import SamplingParams, unpack_i32
from workers.scheduling.request import FinishReason, Request, RequestOutput
from workers.slots import slot_table

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
        slot_table,
        "_shaping_columns",
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


def _joined(outputs: list[RequestOutput], kind: str) -> list[int]:
    """The likeliest tokens of each place."""
    found: list[int] = []
    for output in outputs:
        if kind == "logprobs":
            found += [token for each in output.logprobs or () for token in each.top_ids]
        elif output.prompt_logprobs is not None:
            found += unpack_i32(output.prompt_logprobs.top_ids).tolist()
    return found
