"""Statistics of answers that a stop string ends before the engine does: every delta of such a request has them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from aerie.cluster.transport.messages import SpeculationStats, TokenDelta
from aerie.workers.scheduling.plan import SamplingParams
from tests.support.cluster import TestBed
from tests.support.edge_client import CHAT, HELLO, PROMPT, TEXT, events, in_process
from tests.support.fake_engine import FakeEngine, Step, small_tokenizer


def _letters(prompt: list[int], sampling: SamplingParams) -> Iterable[Step]:
    """Two letters a round, for ever; each delta tells the rounds so far."""
    ids = small_tokenizer().encode("abcdefgh", add_special_tokens=False).ids
    for num_rounds in range(1, 1000):
        at = 2 * (num_rounds - 1) % len(ids)
        stats = SpeculationStats(num_rounds, (0, num_rounds, 0), 2, 2 * num_rounds)
        yield TokenDelta("", tuple(ids[at : at + 2]), cached_tokens=1, speculation=stats)


@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("route", "body"), [(CHAT, HELLO), (TEXT, PROMPT)])
async def test_answer_ended_by_a_stop_string_has_its_statistics(
    route: str, body: dict[str, Any], stream: bool, usage: bool
) -> None:
    engine = FakeEngine(_letters)
    options = {"stream": True, "stream_options": {"include_usage": usage}} if stream else {}
    async with in_process(engine) as client:
        reply = await client.post(route, json=body | {"stop": "e", "max_tokens": 50} | options)
    last = events(reply.text)[-1] if stream else reply.json()
    assert last["metrics"]["speculative_decoding"]["num_spec_steps"] == 3, "the round that brought the stop included"
    assert last["metrics"]["speculative_decoding"]["mean_acceptance_length"] == 2.0
    if usage or not stream:
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
        assert last["usage"]["completion_tokens"] == 5


async def test_statistics_are_asked_for_only_where_a_stop_string_may_end_the_answer() -> None:
    engine = FakeEngine(lambda prompt, sampling: [TokenDelta("", (5,), "length", cached_tokens=0)])
    async with in_process(engine) as client:
        for stop in (None, [], "x", ["x", "y"]):
            (await client.post(TEXT, json=PROMPT | {"stop": stop})).raise_for_status()
    assert [call.running_stats for call in engine.calls] == [False, False, True, True]


@pytest.mark.parametrize("running_stats", [True, False])
def test_coordinator_tells_running_statistics_if_asked(tmp_path: Path, running_stats: bool) -> None:
    bed = TestBed(tmp_path)
    try:
        bed.attach()
        bed.generate("q", max_tokens=30, seed=3, running_stats=running_stats)
        last = bed.ingress.read_end("q")
        _, *before, end = bed.ingress.deltas["q"]  # the first says that it is queued
        assert end is last and len(before) > 3
        assert end.cached_tokens == 0 and end.speculation is not None
        if not running_stats:
            assert all(delta.cached_tokens is None and delta.speculation is None for delta in before)
            return
        rounds = [delta.speculation.num_rounds for delta in (*before, end) if delta.speculation is not None]
        assert len(rounds) == len(before) + 1 and rounds == sorted(rounds) and rounds[0] <= 1
        # Every round's tokens are its accepted ones and one of the target's; the first token comes with the prompt.
        for delta, later in zip(before, (*before[1:], end), strict=True):
            assert delta.speculation is not None and later.speculation is not None
            new = later.speculation.num_rounds - delta.speculation.num_rounds
            assert new == 1 and sum(later.speculation.histogram) == later.speculation.num_rounds
    finally:
        bed.close()
