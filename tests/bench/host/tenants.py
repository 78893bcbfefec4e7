"""Two keys at one server: one floods it with streams, the other's first tokens are compared with those alone.

    python -m tests.bench tenants                                   # the embedded pair on this CPU
    python -m tests.bench tenants --gpu --shape plain --prompt 3000 # Llama-3.1-8B's dimensions, dummy weights

Prints a line for each turn, then one JSON line.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.bench.machine import machine
from tests.bench.open_loop import served
from tests.bench.served_model import add_options, label, prompt_ids, server_config

FLOOD, STEADY = "the-key-of-the-flood", "the-key-of-the-other"
KEYS = [{"name": "flood", "key": FLOOD}, {"name": "steady", "key": STEADY, "admin": True}]
FLOOD_BEGINS_S = 4.0  # from its first request to the other key's


@dataclass(frozen=True)
class Work:
    """Lengths in tokens: of prompts and answers of the flood's `num_flood` requests, which come at once, and of the
    other key's `num_steady`, one after the other with pauses. In these it must ask for less than half of what the
    engine computes, or it is a flood, too, and waits for its turns."""

    num_flood: int = 300
    flood_prompt: int = 200
    flood_answer: int = 400
    num_steady: int = 8
    prompt: int = 500
    answer: int = 8
    pause_s: float = 0.3


class Clients:
    """Both keys' clients at the server `url`. ids: that prompts are made of."""

    def __init__(self, client: httpx.AsyncClient, ids: range, work: Work) -> None:
        self._client, self._ids, self._work, self._rng = client, ids, work, random.Random(0)

    async def first_token_s(self, key: str, prompt: int, max_tokens: int) -> float:
        """Seconds to the first event of a stream, which is read to its end. No prompt begins like another."""
        ids = self._rng.choices(self._ids, k=prompt)
        body = {"prompt": ids, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        begin_s, first_s = time.perf_counter(), 0.0
        headers = {"authorization": f"Bearer {key}"}
        async with self._client.stream("POST", "/v1/completions", json=body, headers=headers, timeout=600) as reply:
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"] and not first_s:
                    first_s = time.perf_counter() - begin_s
        return first_s

    async def steady(self) -> list[float]:
        """First tokens of the other key, in seconds."""
        found = []
        for _ in range(self._work.num_steady):
            found.append(await self.first_token_s(STEADY, self._work.prompt, self._work.answer))
            await asyncio.sleep(self._work.pause_s)
        return found

    async def turn(self) -> tuple[list[float], list[float], int]:
        """First tokens of the other key alone, then beside the flood, and how many of the flood's requests were left
        at the end."""
        alone, work = await self.steady(), self._work
        lengths = (FLOOD, work.flood_prompt, work.flood_answer)
        flood = [asyncio.ensure_future(self.first_token_s(*lengths)) for _ in range(work.num_flood)]
        await asyncio.sleep(FLOOD_BEGINS_S)
        beside = await self.steady()
        num_left = sum(not task.done() for task in flood)
        assert num_left > 20, "the flood was over before"
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        await asyncio.sleep(2.0)
        return alone, beside, num_left


async def measure(url: str, ids: range, work: Work, turns: int, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the figures of each turn after a warm-up: medians and maxima in ms, and the ratio of the medians."""
    found = []
    limits = httpx.Limits(max_connections=2 * work.num_flood)
    async with httpx.AsyncClient(base_url=url, limits=limits) as client:
        clients = Clients(client, ids, work)
        await clients.steady()  # graphs, imports
        for turn in range(turns):
            alone, beside, num_left = await clients.turn()
            figures = {
                name: {"p50": 1000 * statistics.median(times), "max": 1000 * max(times)}
                for name, times in (("alone", alone), ("beside", beside))
            }
            ratio = figures["beside"]["p50"] / figures["alone"]["p50"]
            cells = [f"{figures[name][value]:.0f}" for name in figures for value in ("p50", "max")]
            report(
                f"turn {turn}: alone p50/max {cells[0]}/{cells[1]} ms, beside {cells[2]}/{cells[3]} ms, "
                f"ratio {ratio:.2f}, {num_left} of the flood left"
            )
            found.append({**figures, "ratio": ratio, "flood_left": num_left})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    for name, value in vars(Work()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    work = Work(**{name: getattr(arguments, name) for name in vars(Work())})
    with tempfile.TemporaryDirectory(prefix="tenants") as folder:
        content = server_config(arguments, Path(folder))
        content["applications"][0]["args"].setdefault("ingress", {})["api_keys"] = KEYS
        with served(arguments, content) as url:
            turns = asyncio.run(measure(url, prompt_ids(arguments), work, arguments.turns, print))
    print(json.dumps({"bench": "tenants", "machine": machine(), "server": label(arguments), "turns": turns}))


if __name__ == "__main__":
    main()
