"""The draft's KV of plain rounds, written several rounds at a time: drafts are as good as if every round wrote it."""

from typing import Any, cast

import pytest
import torch

import aerie.speculative.step_parts as backlog
from aerie.kernels.tree.acceptance import accept_commit
from aerie.kernels.tree.nodes import Tree, root_only_trees
from aerie.speculative.build import local_engine
from aerie.speculative.drafts.drafter import DraftRunner
from aerie.speculative.step_parts import Rounds
from aerie.workers.config import RoundShapes
from aerie.workers.sampling import Sampled
from aerie.workers.scheduling.plan import SamplingParams, SlotInit, pack_i32
from aerie.workers.slots import SlotTable
from tests.speculative.conftest import EOS, Pair
from tests.support.slots import enter
from tests.support.slow import slow

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


@pytest.mark.parametrize(("num_requests", "expected"), [(1, [48, 48, 4]), (30, [17, 17, 17, 17, 17, 15])])
def test_a_pass_writes_many_rounds_but_no_more_rows_than_are_kept(num_requests: int, expected: list[int]) -> None:
    """A pass of 16 rows takes hardly longer than one of a single row: passes every 16 rounds took 0.7 to 1.9 % of the
    embedded pair's time where nothing was drafted."""
    written = []

    class Draft:
        def keep(self, ids: torch.Tensor, features: torch.Tensor, extend: Any, chunks: Any) -> None:
            assert len(ids) == len(features) == num_requests * extend.rows
            assert ids.view(num_requests, -1)[0].tolist() == list(range(sum(written), sum(written) + extend.rows))
            written.append(extend.rows)

    table, slots = SlotTable(num_requests, 4, 200, torch.device("cpu")), torch.arange(num_requests)
    for slot in range(num_requests):
        enter(table, SlotInit(slot, slot, 1, 300, SamplingParams(250, 0.0), pack_i32([1]), pack_i32([slot])))
    waiting = backlog.DraftBacklog(cast(DraftRunner, Draft()), table)
    for token in range(100):
        chosen, length = torch.full((num_requests, 1), token), table.seq_len[slots]
        tree = Tree(*(each.contiguous() for each in root_only_trees(chosen[:, 0], 1).fields))
        done = accept_commit(slots, tree, chosen, table.commit_tables, 0)
        waiting.add(slots, Rounds(length, table.page_table[slots], Sampled(chosen, None), done, chosen.float()), 400)
    waiting.write()
    assert written == expected
