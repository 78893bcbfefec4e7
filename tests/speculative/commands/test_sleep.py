"""A real engine that gives its KV cache back, loads other weights meanwhile, and wakes."""

import pytest

from aerie.speculative.build import local_engine
from aerie.workers.scheduling.commands.command import ReleasedPages, ReleasePages, RestorePages, Work, first_error
from tests.speculative.commands.test_weight_updates import (
    Version,
    answers_of,
    loaded,
    other,  # noqa: F401 - a fixture
    speculation,
    started_with,
)
from tests.speculative.conftest import Pair


@pytest.mark.parametrize(("kind", "tensor_parallel"), [("plain", 1), ("tree", 2)])
def test_texts_after_a_sleep_are_those_of_an_engine_that_never_slept(
    pair: Pair,
    other: Version,  # noqa: F811
    kind: str,
    tensor_parallel: int,
) -> None:
    with local_engine(started_with(pair, other, kind)) as engine:
        expected = answers_of(engine, pair.prompts[:3], "x")
    with local_engine(pair.spec(speculation(pair, kind), tensor_parallel=tensor_parallel)) as engine:

        def told(work: Work) -> list[int]:
            """The bytes that each rank gives back."""
            found: list[int] = []

            def answered(answers: object) -> None:
                assert isinstance(answers, list | tuple) and first_error(answers) == ""
                found.extend(each.result.num_bytes for each in answers if isinstance(each.result, ReleasedPages))

            engine.scheduler.add_command(work, answered)
            while not found:
                engine.step()
            return found

        before = answers_of(engine, pair.prompts[:3], "a")
        for name in ("b", "c"):
            engine.scheduler.flush_prefix_cache()
            freed = told(ReleasePages())
            assert len(freed) == tensor_parallel and min(freed) > 400 * 4
            assert told(RestorePages()) == [0] * tensor_parallel
            assert answers_of(engine, pair.prompts[:3], name) == before
        engine.scheduler.flush_prefix_cache()
        told(ReleasePages())
        work = other.update if kind != "plain" else type(other.update)(other.update.target)
        loaded(engine, work)
        told(RestorePages())
        assert answers_of(engine, pair.prompts[:3], "d") == expected
