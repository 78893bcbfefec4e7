"""Whatever grammar a request brings, its neighbours notice nothing, and it ends with an answer or a reason.

The engine meets these grammars without the trial that a server makes of each before, which refuses the hardest.
"""

import json
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from aerie.speculative.build import local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.scheduling.plan import Grammar, SamplingParams
from aerie.workers.scheduling.request import FinishReason, Request, RequestOutput
from tests.support.embedded import CHAIN, TREE, embedded_spec
from tests.support.prompts import held_out_prompts, tokenized
from tests.support.slow import slow
from tests.support.structured_output.hostile import KNOWN, STOPS, grammars
from tests.support.structured_output.sampled import text_of

PROMPTS = tokenized(held_out_prompts(8))
FREE = SamplingParams(16, 0.0)
HARDER = Grammar("regex", "(([a-z ]{0,90}){0,90}){0,50}", STOPS)  # than KNOWN[0]: fewer tokens before it ends
ENDS = {FinishReason.STOP, FinishReason.LENGTH, FinishReason.INVALID}


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    torch.set_num_threads(1)
    with local_engine(embedded_spec(CHAIN)) as made:
        yield made


class Run:
    """Requests with grammars beside plain ones. ends: how each ended, and why."""

    names = 0

    def __init__(self, engine: LocalEngine, asked: Sequence[Grammar], max_tokens: int = 12, num_free: int = 2) -> None:
        Run.names += 1
        self.free = [Request(f"free {Run.names} {i}", PROMPTS[i], FREE) for i in range(num_free)]
        self.bound = [
            Request(
                f"{Run.names} {i}",
                PROMPTS[i % len(PROMPTS)],
                SamplingParams(max_tokens, 0.0, stop_token_ids=STOPS, grammar=grammar),
            )
            for i, grammar in enumerate(asked)
        ]
        self.ends: dict[str, tuple[FinishReason, str | None]] = {}
        engine.run([*self.bound, *self.free], 16, self._hear)

    def _hear(self, output: RequestOutput) -> None:
        if output.finish_reason is not None:
            self.ends[output.request.request_id] = output.finish_reason, output.error

    def of(self, request: Request) -> tuple[FinishReason, str | None]:
        return self.ends[request.request_id]


@pytest.fixture(scope="module")
def alone(engine: LocalEngine) -> list[list[int]]:
    return [request.output for request in Run(engine, []).free]


TEXTS = [["да", "нет"], ["да"], ["北京", "南京"], ["é"], ["😀", "😁"], ["ё", "e"]]


def assert_choices(engine: LocalEngine) -> Run:
    """Each as a choice and as a regular expression."""
    both = [
        (texts, grammar)
        for texts in TEXTS
        for grammar in (
            Grammar("choice", json.dumps(texts), STOPS),
            Grammar("regex", "(" + "|".join(texts) + ")", STOPS),
        )
    ]
    run = Run(engine, [grammar for _, grammar in both])
    for (texts, _), request in zip(both, run.bound, strict=True):
        assert text_of(request.output) in texts
    return run


def test_choices_in_any_language(engine: LocalEngine, alone: list[list[int]]) -> None:
    assert [request.output for request in assert_choices(engine).free] == alone


@pytest.mark.parametrize("speculative", slow(TREE, None), ids=["tree", "plain"])
def test_choices_in_any_language_on_other_engines(speculative: SpeculativeConfig | None) -> None:
    with local_engine(embedded_spec(speculative)) as engine:
        assert_choices(engine)


@pytest.mark.slow  # the limit of a mask: `tests.workers.structured_output.test_mask_host`
@pytest.mark.parametrize("known", [HARDER, KNOWN[0], KNOWN[1]], ids=["harder regex", "regex", "ebnf"])
def test_known_grammars_of_seconds_per_token_hurt_themselves_alone(
    engine: LocalEngine, alone: list[list[int]], known: Grammar
) -> None:
    run = Run(engine, [known], max_tokens=6)
    assert [request.output for request in run.free] == alone
    reason, error = run.of(run.bound[0])
    assert reason in ENDS
    if known.kind == "regex":  # KNOWN[0] at its fifth token
        assert reason is FinishReason.INVALID and "for one token" in str(error)


def test_a_grammar_without_a_way_on_ends_its_request_with_the_reason(
    engine: LocalEngine, alone: list[list[int]]
) -> None:
    run = Run(engine, [Grammar("regex", "(", STOPS), Grammar("structural_tag", "{}", STOPS)])
    assert [request.output for request in run.free] == alone
    assert [run.of(request)[0] for request in run.bound] == [FinishReason.INVALID] * 2
    assert all(run.of(request)[1] for request in run.bound)


@pytest.mark.slow  # and `make test-hostile`, at a served engine
@settings(
    max_examples=2,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(asked=st.lists(grammars, min_size=2, max_size=2))
def test_any_grammar_ends_with_an_answer_or_a_reason(
    engine: LocalEngine, alone: list[list[int]], asked: list[Grammar]
) -> None:
    run = Run(engine, asked, max_tokens=3)
    assert [request.output for request in run.free] == alone
    for request in run.bound:
        reason, error = run.of(request)
        assert reason in ENDS, f"{request.sampling.grammar}: {reason} {error}"
        assert reason is not FinishReason.INVALID or error


def test_a_request_that_is_late_writes_what_it_would_have_written(engine: LocalEngine) -> None:
    """An answer whose masks are slow, though not too slow, beside others and alone."""
    slow = Grammar("regex", "([A-Za-z ,.]{1,200}\\n?){1,20}", STOPS)
    together = Run(engine, [slow, replace(slow, text="[a-z ]{10}")], max_tokens=16)
    lone = Run(engine, [slow], max_tokens=16, num_free=0)
    assert together.bound[0].output == lone.bound[0].output
