"""`aerie bench` against a real server with a scripted engine."""

import asyncio
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest

from aerie.cluster.transport.messages import TokenDelta
from aerie.deploy.cli import main
from aerie.workers.scheduling.plan import SamplingParams
from tests.support.edge_client import served
from tests.support.fake_engine import FakeEngine, Step

KEY = "first-key"


def _script(prompt: list[int], sampling: SamplingParams) -> Iterator[Step]:
    for number in range(sampling.max_tokens):
        yield TokenDelta("", (70,), "length" if number == sampling.max_tokens - 1 else None)


async def _bench(engine: FakeEngine, *options: str) -> int:
    async with served(engine, max_model_len=256, api_keys=(KEY,)) as url:
        return await asyncio.to_thread(main, ["bench", url, "--key", KEY, *options])


async def test_table_figures_and_plot_of_two_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ("--plot", str(tmp_path / "x.svg"), "--json", str(tmp_path / "x.json"))
    engine = FakeEngine(_script)
    options = ("--rates", "40,80", "--secs", "0.5", "--warm", "2", "--name", "mine", *files)
    assert await _bench(engine, *options, "--extra", '{"speculative": false}') == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].startswith("| server | req/s |") and rows[2].startswith("| mine ") and len(rows) == 4
    figures = [json.loads(line) for line in (tmp_path / "x.json").read_text().splitlines()]
    assert [figure["rate"] for figure in figures] == [40, 80]
    for figure in figures:
        assert figure["completed"] == figure["sent"] > 5 and figure["errors"] == figure["wrong_length"] == 0
    assert len(engine.calls) == 5 + sum(figure["sent"] for figure in figures)
    assert not any(call.sampling.speculative for call in engine.calls)
    # Lengths that no option gives suit the model's.
    assert all(len(call.prompt) <= 192 and call.sampling.max_tokens <= 64 for call in engine.calls)
    assert max(max(call.prompt) for call in engine.calls) < 270  # the vocabulary's
    assert ElementTree.fromstring((tmp_path / "x.svg").read_text()).tag.endswith("svg")


async def test_failures_are_counted_named_and_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(lambda p, s: [TokenDelta("", (70,)), TokenDelta("", (), "error", error="rank 1 died")])
    assert await _bench(engine, "--rates", "40", "--secs", "0.2", "--warm", "0") == 1
    assert "The engine failed" in capsys.readouterr().err
    assert await _bench(engine, "--rates", "40", "--secs", "0.2") == 2
    assert "the warm-up failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--rates", "1,x"), "--rates 1,x: must be numbers above 0"),
        (("--rates", "0"), "--rates 0: must be numbers above 0"),
        (("--plot", "x.png"), "must end in .svg"),
        (("--extra", "[]"), "must be a JSON object"),
        (("--in-cap", "250"), "--in-cap 250 and --out-cap 64: together at most 256"),
        (("--out-sigma", "-1"), "--out-sigma: must be"),
        (("--secs", "0"), "--secs, --max-requests, --vocab"),
    ],
)
async def test_options_that_cannot_be_are_one_line(
    options: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(_script)
    assert await _bench(engine, *options) == 2
    assert reason in capsys.readouterr().err and not engine.calls
