"""Hostile grammars beside plain streams, over a served engine: whether the plain ones notice.

    python -m tests.load.hostile.grammars http://127.0.0.1:8000 --seconds 120 --seed 1

Sends 32 requests at a time with generated grammars (`tests.support.structured_output.hostile`), or with those of a file
(`--file`, lines of JSON: bodies of /v1/completions without model and prompt). Four plain streams run beside them, in
another process (`tests.load.hostile.plain_streams`). Prints one line of JSON. Ends with 0 if

- the longest gap of each plain stream is within twice its median and one ITL target, and its text is unchanged;
- no worker was restarted;
- every request was answered or refused with a reason.

With `--pid`, of a server on this machine, time in which other programs used the cores does not count.
"""

import argparse
import asyncio
import collections
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from aerie.workers.scheduling.plan import Grammar
from tests.load.cpu_lent import CpuLent
from tests.load.hostile.drawing import drawn
from tests.load.hostile.plain_streams import ANSWER_LIMIT_S, ended, plain_streams
from tests.load.hostile.priority import outweighing
from tests.support.structured_output.hostile import grammars

NUM_STREAMS = 32
MAX_TOKENS = 60


@dataclass
class Report:
    """gaps_ms: of each plain answer, without the wait for its first token. own_ms: the same without what the machine
    lent to others. endings: of hostile requests, by reason. alone_ms: of the plain answers before the attack. faults:
    what must not be."""

    gaps_ms: list[list[float]] = field(default_factory=list)
    own_ms: list[list[float]] = field(default_factory=list)
    alone_ms: list[list[float]] = field(default_factory=list)
    endings: collections.Counter[str] = field(default_factory=collections.Counter)
    faults: list[str] = field(default_factory=list)

    def judge(self, target_ms: float) -> None:
        """Add the plain streams' faults."""
        for gaps, own in zip(self.gaps_ms, self.own_ms, strict=True):
            limit_ms = 2 * statistics.median(gaps) + target_ms
            if max(own) > limit_ms:
                self.faults.append(f"a gap of {max(own):.0f} ms, at most {limit_ms:.0f} wanted")

    def summary(self, target_ms: float) -> dict[str, Any]:
        """For the last line."""
        medians = [statistics.median(gaps) for gaps in self.gaps_ms]
        return {
            "plain_answers": len(self.gaps_ms),
            "median_gap_ms": round(statistics.median(medians), 1) if medians else None,
            "longest_gap_ms": round(max(map(max, self.gaps_ms)), 1) if self.gaps_ms else None,
            "longest_own_gap_ms": round(max(map(max, self.own_ms)), 1) if self.own_ms else None,
            "longest_gap_alone_ms": round(max(map(max, self.alone_ms)), 1) if self.alone_ms else None,
            "target_ms": target_ms,
            "endings": dict(self.endings.most_common()),
            "faults": self.faults,
        }


def made_bodies(number: int, count: int) -> list[dict[str, Any]]:
    """Bodies with grammars that hypothesis makes from a seed."""
    found = drawn(grammars, number, count)
    return [body_of(grammar) for grammar in found]


def body_of(grammar: Grammar) -> dict[str, Any]:
    """The parameters that ask for a grammar."""
    names = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "choice": "choice"}
    value = json.loads(grammar.text) if grammar.kind in ("json_schema", "choice") else grammar.text
    return {"structured_outputs": {names[grammar.kind]: value}}


class Attack:
    """client: of the server. bodies: endless. server: its process on this machine, if its gaps are to be without what
    other programs took."""

    def __init__(
        self, client: httpx.AsyncClient, model: str, bodies: Iterator[Mapping[str, Any]], server: int | None
    ) -> None:
        self.report = Report()
        self._server = server
        self._client = client
        self._model = model
        self._bodies = bodies

    async def run(self, seconds: float) -> Report:
        """Plain streams alone first, then both."""
        report = self.report
        before = await self._restarts()
        async with plain_streams(str(self._client.base_url), self._model) as (process, alone):
            sampled = CpuLent(self._server, process.pid) if self._server else None
            with sampled or contextlib.nullcontext(), outweighing() if sampled else contextlib.nullcontext():
                end_s = time.monotonic() + seconds
                await asyncio.gather(*(self._hostile_until(end_s) for _ in range(NUM_STREAMS)))
                plain = await ended(process)
        report.alone_ms, report.gaps_ms = alone.gaps_ms(), plain.gaps_ms()
        report.own_ms = report.gaps_ms if sampled is None else sampled.without_lent(plain.stamps, plain.waited_ms)
        report.faults += alone.faults + plain.faults
        if (after := await self._restarts()) != before:
            report.faults.append(f"workers were restarted {after - before} times")
        return report

    async def _hostile_until(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            asked = next(self._bodies)
            body = {"model": self._model, "prompt": "Say", "max_tokens": MAX_TOKENS, "temperature": 0} | dict(asked)
            try:
                answer = await self._client.post("/v1/completions", json=body)
            except httpx.HTTPError as error:
                self.report.faults.append(f"{asked}: {type(error).__name__}: {error}")
                continue
            reason = ""
            if answer.status_code != 200:
                reason = str(answer.json()["error"]["message"])
                if not reason or answer.status_code not in (400, 429, 503):
                    self.report.faults.append(f"{asked}: {answer.status_code} {reason}")
            self.report.endings[f"{answer.status_code} {reason[:60]}".strip()] += 1

    async def _restarts(self) -> int:
        answer = await self._client.get("/metrics")
        found = [line for line in answer.text.splitlines() if line.startswith("aerie:worker_restarts")]
        return int(sum(float(line.rpartition(" ")[2]) for line in found))


async def attack(
    url: str,
    model: str,
    seconds: float,
    number: int = 0,
    lines: list[dict[str, Any]] | None = None,
    server: int | None = None,
) -> Report:
    """number: seed of the grammars; lines: bodies instead of them. server: the process of `aerie serve`, if it runs on
    this machine."""
    bodies = lines or made_bodies(number, 400)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_LIMIT_S, limits=limits) as client:
        return await Attack(client, model, itertools.cycle(bodies), server).run(seconds)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--model", default="target")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--target-ms", type=float, default=50.0, help="the engine's itl_target_ms, which its start prints"
    )
    parser.add_argument("--file", type=Path)
    parser.add_argument("--pid", type=int, help="of `aerie serve` on this machine")
    given_ = parser.parse_args(arguments)
    lines = [json.loads(line) for line in given_.file.read_text().splitlines()] if given_.file else None
    report = asyncio.run(attack(given_.url, given_.model, given_.seconds, given_.seed, lines, given_.pid))
    report.judge(given_.target_ms)
    print(json.dumps(report.summary(given_.target_ms), ensure_ascii=False))
    return int(bool(report.faults))


if __name__ == "__main__":
    sys.exit(main())
