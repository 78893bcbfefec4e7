"""The trace of a first token: its borders exist, its stamps come back, its legs leave no gap."""

import asyncio
import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.deploy.bench.figures import percentile
from tests.bench.served import ROOT
from tests.bench.served_model import write_tokenizer
from tests.bench.tracing import stamps
from tests.bench.tracing.first_token import leg_table
from tests.bench.tracing.legs import _POINTS, LEGS, START, Exchange, durations, summary
from tests.bench.tracing.stamps import (
    BORDERS,
    NOTHING,
    POINTS,
    REQUEST_ID,
    Border,
    Recorder,
    Stamp,
    read,
    wrapped,
    write_hook,
)

_ABOUT = {leg.end: leg.about for leg in LEGS}


@pytest.mark.parametrize("border", BORDERS, ids=lambda border: border.where)
def test_border_is_a_function_of_ours(border: Border) -> None:
    module, _, path = border.where.partition(":")
    function = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    assert inspect.isfunction(function) and not inspect.isasyncgenfunction(function)
    assert border.entered or border.left


def test_every_leg_ends_at_a_point() -> None:
    assert {_POINTS.get(leg.end, leg.end) for leg in LEGS if leg.about != "client"} <= set(POINTS)
    assert len(set(POINTS)) == len(POINTS)


def test_stamps_come_back_from_the_file(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    border = Border("module:name", lambda args, result: [(result, args[0])], entered="choice_begun", left="planned")

    async def later(number: int) -> str:
        await asyncio.sleep(0)
        return f"late-{number}"

    def fails(number: int) -> str:
        raise ValueError(number)

    assert wrapped(lambda number: f"name-{number}", border, recorder.put)(3) == "name-3"
    assert asyncio.run(wrapped(later, border, recorder.put)(4)) == "late-4"
    with pytest.raises(ValueError):
        wrapped(fails, border, recorder.put)(5)
    found = list(read(tmp_path))
    assert [(s.point, s.name, s.number, s.pid) for s in found] == [
        (point, name, number, os.getpid())
        for name, number in (("name-3", 3), ("late-4", 4))
        for point in ("choice_begun", "planned")
    ]
    assert found[0].at_ns <= found[1].at_ns <= found[2].at_ns


def test_a_process_with_the_hook_stamps_what_it_does(tmp_path: Path) -> None:
    folder = tmp_path / "stamps"
    hook = write_hook(folder)
    code = (
        "from tests.bench.tracing import stamps\n"
        "from aerie.cluster.http import endpoint\n"
        "from aerie.cluster.http.schema.request import CompletionRequest\n"
        'endpoint.parse_body(b\'{"model": "m"}\', CompletionRequest)\n'
        "stamps._traced.set(7)\n"
        'endpoint.parse_body(b\'{"model": "m"}\', CompletionRequest)\n'
    )
    path = os.pathsep.join((str(hook), str(ROOT)))
    subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=True, timeout=60
    )
    assert [(stamp.point, stamp.number) for stamp in read(folder)] == [("body_parsed", 7)]


def test_request_is_traced_by_its_header_alone() -> None:
    headers = [(b"x-request-id", f"{REQUEST_ID}12".encode())]
    assert stamps._begin((None, {"headers": headers}), None) == [("", 12)]
    assert stamps._begin((None, {"headers": [(b"x-request-id", b"other")]}), None) == []


def _stamps(number: int, step: int, at: dict[str, int], pids: dict[str, int]) -> list[Stamp]:
    """Return the stamps of one request, as a server writes them."""
    name = f"cmpl-{number}-0"
    out = []
    for point, at_ns in at.items():
        subject: tuple[str, int]
        if _ABOUT[point] == "step":
            subject = ("", step)
        elif _ABOUT[point] == "name":
            subject = (name, NOTHING)
        elif point == "request_made":
            subject = (name.removesuffix("-0"), number)
        else:
            subject = ("", number)
        out.append(Stamp(point, at_ns, *subject, pids.get(point, 1)))
    out += [
        Stamp(point, at["submitted"] + 10, prefix + name, step, 1)
        for point in ("plan_begun", "planned")
        for prefix in ("+", "")
    ]
    return out


def _whole(begin_ns: int) -> dict[str, int]:
    """Stamps 1 us apart."""
    ends = [leg.end for leg in LEGS if leg.about in ("traced", "name", "step")]
    return {end: begin_ns + 1000 * (place + 1) for place, end in enumerate(ends)}


def test_legs_add_up_to_what_the_client_waited() -> None:
    at = _whole(0)
    exchange = Exchange(5, 0, 100_000)
    (legs,) = durations(_stamps(5, 9, at, {"result_sent": 2, "plan_received": 2}), [exchange])
    assert list(legs) == [leg.end for leg in LEGS]
    assert sum(legs.values()) == pytest.approx(100.0) and min(legs.values()) >= 0
    assert legs["rank_free"] == legs["device_free"] == 0.0  # there was no step before


def test_step_before_that_ends_meanwhile_is_a_leg_of_its_own() -> None:
    at = _whole(0)
    found = _stamps(5, 9, at, {})
    found += [Stamp("step_done", at["launched"] + 400, "", 8, 1), Stamp("launched", at["plan_sent"] - 1, "", 8, 1)]
    (legs,) = durations(found, [Exchange(5, 0, 100_000)])
    assert legs["device_free"] == pytest.approx(0.4) and legs["step_done"] == pytest.approx(0.6)
    assert legs["rank_free"] == 0.0


def test_other_ranks_do_not_count() -> None:
    at = _whole(0)
    leader = {end: 2 for end, about in _ABOUT.items() if about == "step"}
    found = _stamps(5, 9, at, leader)
    found += [Stamp("plan_received", at["plan_sent"] + 1, "", 9, 3), Stamp("launched", at["plan_sent"] + 2, "", 9, 3)]
    (legs,) = durations(found, [Exchange(5, 0, 100_000)])
    assert legs["plan_received"] == pytest.approx(1.0)


def test_missing_stamp_is_named_unless_it_may_be_missing() -> None:
    at = _whole(0)
    del at["prompt_rendered"], at["tokenized"]
    (legs,) = durations(_stamps(5, 9, at, {}), [Exchange(5, 0, 100_000)])
    assert "tokenized" not in legs and sum(legs.values()) == pytest.approx(100.0)
    stamps_left = [stamp for stamp in _stamps(5, 9, at, {}) if stamp.point != "submitted"]
    with pytest.raises(KeyError, match="request 5: no stamp submitted"):
        durations(stamps_left, [Exchange(5, 0, 100_000)])


def test_table_has_a_row_for_each_leg_and_one_for_all() -> None:
    (legs,) = durations(_stamps(5, 9, _whole(0), {}), [Exchange(5, 0, 100_000)])
    found = summary([legs, legs])
    assert found["total"] == {"median_us": 100.0, "p99_us": 100.0}
    lines = leg_table(found)
    assert len(lines) == 2 + len(LEGS) + 1 and "all" in lines[-1] and START not in found


def test_percentile_lies_between_neighbours() -> None:
    assert percentile([4.0, 1.0, 3.0], 0.5) == 3.0 and percentile([1.0, 2.0], 0.25) == 1.25
    assert percentile([7.0], 0.99) == 7.0


def test_every_token_of_the_dummy_tokenizer_shows(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 1000)
    tokenizer = ChatTokenizer.from_folder(tmp_path)
    assert tokenizer.vocab_size == 1000 and tokenizer.eos_token_ids == ()
    seen = tokenizer.detokenizer(True)
    assert all(seen.step(token) for token in range(256, 1000))
    ids = asyncio.run(tokenizer.encode(tokenizer.render([{"role": "user", "content": "Hi you"}]), False))
    assert tokenizer.decode(ids) == "user: Hi you\nassistant:"


@pytest.mark.ray
@pytest.mark.slow
def test_first_token_of_a_whole_server_is_traced() -> None:
    options = ["--loads", "plain:4", "--seconds", "2", "--prompt-tokens", "40"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", "first_token", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["bench"] == "first_token" and set(result["results"]) == {"plain, 4/s"}
    assert result["results"]["plain, 4/s"]["total"]["median_us"] > 0
