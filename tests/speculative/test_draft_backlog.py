"""The draft's KV of plain rounds, written several rounds at a time: drafts are as good as if every round wrote it."""

import pytest

import speculative.draft_backlog as backlog
from speculative.local import local_engine
from tests.speculative.conftest import EOS, Pair
from tests.support.slow import slow
from workers.config import RoundShapes
from workers.scheduling.plan import SamplingParams

PLAIN_STEPS = 21  # more than a backlog holds, and no multiple of it


def run(pair: Pair, max_rounds: int, monkeypatch: pytest.MonkeyPatch, shape: str) -> tuple[list[list[int]], list[int]]:
    """Answers, and rounds by drafts accepted. Plain rounds, then drafts, and again, while requests come and end."""
    monkeypatch.setattr(backlog, "MAX_ROUNDS", max_rounds)
    speculative = pair.chain() if shape == "chain" else pair.tree()
    with local_engine(pair.spec(speculative)) as engine:
        steps = 0

        def choose(shapes: RoundShapes) -> int:
            nonlocal steps
            steps += 1
            return 0 if steps % (PLAIN_STEPS + 6) < PLAIN_STEPS else shapes.default

        engine.scheduler.rounds.choose_shape = choose
        sampling = SamplingParams(70, 0.0, stop_token_ids=(EOS,))
        requests = engine.generate(pair.prompts[:5], sampling, 3)
        return [request.output for request in requests], list(engine.scheduler.stats.accepted_histogram)


@pytest.mark.parametrize("shape", ["chain", *slow("tree")])
def test_drafts_after_plain_rounds_are_accepted_as_if_each_had_written_its_kv(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    answers, accepted = run(pair, 1, monkeypatch, shape)
    assert run(pair, 16, monkeypatch, shape) == (answers, accepted)
    assert sum(k * n for k, n in enumerate(accepted)) > 0.3 * sum(accepted), accepted


@pytest.mark.slow
def test_kv_that_is_not_written_is_noticed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: drafts that lack it are accepted less."""
    _, accepted = run(pair, 1, monkeypatch, "tree")
    monkeypatch.setattr(backlog.DraftBacklog, "add", lambda *_: None)
    _, fewer = run(pair, 16, monkeypatch, "tree")
    assert fewer != accepted
