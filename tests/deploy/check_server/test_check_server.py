"""`aerie exact` and `aerie check-server`: a server without a fault passes, and each planted fault is found."""

import asyncio
from pathlib import Path

import pytest

from aerie.deploy.check_server import ask
from aerie.deploy.cli import main
from tests.deploy.check_server.fake_server import FakeServer
from tests.support.edge_client import serving

OPTIONS = ["--prompts", "8", "--words", "60", "--max-tokens", "12", "--loads", "8"]


@pytest.fixture(autouse=True)
def near_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of this process has neighbours' requests at once."""
    monkeypatch.setattr(ask, "HEAD_START_S", 0.03)


async def checked(command: str, fault: str, *options: str) -> int:
    async with serving(FakeServer(fault).app()) as url:
        return await asyncio.to_thread(main, [command, url, *OPTIONS, *options])


@pytest.mark.parametrize("fault", ["", "no switch", "no ids"])
async def test_a_server_without_a_fault_passes(fault: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert await checked("check-server", fault, "--no-cache", "--report", str(page)) == 0
    printed = capsys.readouterr().out
    assert page.read_text() in printed and "identifiers copied under load" in printed
    assert ("without speculation" in printed) == (fault != "no switch")
    assert ("token ids" in printed) == (fault != "no ids")


@pytest.mark.parametrize(
    ("fault", "circumstance"),
    [("load", "8 at once"), ("cache", "from the cache"), ("speculation", "without speculation"), ("rounding", "8 at")],
)
async def test_answers_that_depend_on_something_else_are_found(
    fault: str, circumstance: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await checked("exact", fault) == 1
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"| {circumstance}")]
    cells = [cell.strip() for cell in rows[0].split("|")]
    assert cells[2] == "8" and int(cells[5] if fault == "rounding" else cells[3]) > 0


async def test_log_probabilities_may_differ_if_only_texts_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert await checked("exact", "rounding", "--texts-only") == 0
    assert "9.5e-07" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("copies", "identifiers copied under load: '"),
        ("stops", "the answer contains its stop string"),
        ("streams", "streamed text: streamed '"),
        ("no usage", "the last chunk with include_usage is not one of usage alone"),
        ("usage", "tokens are"),
        ("log-probabilities", "log-probabilities of"),
        ("tool id", "a call's id changes from 'call-1' to 'call-0'"),
        ("tool arguments", "arguments are no JSON"),
        ("tool chunk", "a chunk has several deltas of one call: [0, 0]"),
    ],
)
async def test_what_breaks_clients_is_found(fault: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await checked("check-server", fault, "--no-cache", "--loads", "6", "--prompts", "4") == 1
    assert problem in capsys.readouterr().out


def test_without_a_server_the_address_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exact", "http://127.0.0.1:9"]) == 2
    assert "no server answers" in capsys.readouterr().err
