"""Kills workers of a running Aerie under load and prints a timeline: completions, errors, health, per second.

    aerie serve deploy/eagle.yaml &          # on this machine
    python -m tests.load.kill_worker --streams 16 --kills 3 --every 15

Ends with the number of failed requests, the longest silence of any stream, and the time to recover after each kill.
Exits 1 if a request failed or the server did not come back.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx
import psutil


@dataclass
class Timeline:
    """Events by second since the start."""

    started_s: float = field(default_factory=time.monotonic)
    completed: Counter[int] = field(default_factory=Counter)
    tokens: Counter[int] = field(default_factory=Counter)
    errors: Counter[int] = field(default_factory=Counter)
    notes: dict[int, list[str]] = field(default_factory=dict)
    longest_silence_s: float = 0.0
    recoveries_s: list[float] = field(default_factory=list)

    @property
    def second(self) -> int:
        return int(time.monotonic() - self.started_s)

    def note(self, text: str) -> None:
        self.notes.setdefault(self.second, []).append(text)

    def print(self) -> None:
        print(f"{'s':>4} {'done':>5} {'errors':>6} {'chunks':>6}")
        for second in range(self.second + 1):
            notes = "; ".join(self.notes.get(second, []))
            print(f"{second:>4} {self.completed[second]:>5} {self.errors[second]:>6} {self.tokens[second]:>6}  {notes}")


def worker_pids() -> list[int]:
    """Ranks on this machine, spare workers left out."""
    titles = ((process.pid, process.info["cmdline"]) for process in psutil.process_iter(["cmdline"]))
    return [pid for pid, title in titles if title and title[0].startswith("ray::Worker.run")]


async def stream_forever(client: httpx.AsyncClient, url: str, model: str, timeline: Timeline, stop_s: float) -> None:
    """One request after another until `stop_s`."""
    rng = random.Random(id(client))
    while time.monotonic() < stop_s:
        body = {
            "model": model,
            "prompt": f"Question {rng.random()}: how",
            "max_tokens": 64,
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
        }
        last_s = time.monotonic()
        try:
            async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                failed = answer.status_code != 200
                async for line in answer.aiter_lines():
                    if not line:
                        continue
                    failed = failed or "error" in json.loads(line.removeprefix("data: ").replace("[DONE]", "{}"))
                    now = time.monotonic()
                    timeline.longest_silence_s = max(timeline.longest_silence_s, now - last_s)
                    last_s = now
                    timeline.tokens[timeline.second] += 1
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            failed = True
            timeline.note(f"{type(error).__name__}")
        (timeline.errors if failed else timeline.completed)[timeline.second] += 1
        if failed:
            await asyncio.sleep(0.2)


async def kill_and_watch(client: httpx.AsyncClient, url: str, timeline: Timeline, kills: int, every_s: float) -> bool:
    """Kill one worker every `every_s` and wait for /health to go bad and good again."""
    for _ in range(kills):
        await asyncio.sleep(every_s)
        victim = random.choice(worker_pids())
        killed_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        timeline.note(f"killed worker {victim}")
        bad_s: float | None = None
        while time.monotonic() - killed_s < 120:
            status = (await client.get(f"{url}/health", timeout=30)).status_code
            if status != 200 and bad_s is None:
                bad_s = time.monotonic()
                timeline.note(f"/health {status} after {bad_s - killed_s:.2f} s")
            if status == 200 and bad_s is not None:
                timeline.recoveries_s.append(time.monotonic() - killed_s)
                timeline.note(f"/health 200 after {timeline.recoveries_s[-1]:.1f} s")
                break
            await asyncio.sleep(0.1)
        else:
            timeline.note("did not recover in 120 s")
            return False
    await asyncio.sleep(every_s / 2)
    return True


async def run(arguments: argparse.Namespace) -> int:
    timeline = Timeline()
    async with httpx.AsyncClient(timeout=180, limits=httpx.Limits(max_connections=None)) as client:
        model = (await client.get(f"{arguments.url}/v1/models")).json()["data"][0]["id"]
        stop_s = time.monotonic() + 10_000
        load = [
            asyncio.create_task(stream_forever(client, arguments.url, model, timeline, stop_s))
            for _ in range(arguments.streams)
        ]
        recovered = await kill_and_watch(client, arguments.url, timeline, arguments.kills, arguments.every)
        for task in load:
            task.cancel()
        await asyncio.gather(*load, return_exceptions=True)
    timeline.print()
    failed = sum(timeline.errors.values())
    print(
        f"completed {sum(timeline.completed.values())}, failed {failed}, longest silence of a stream "
        f"{timeline.longest_silence_s:.1f} s, recovered after {[round(s, 1) for s in timeline.recoveries_s]} s"
    )
    return 0 if recovered and not failed else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--every", type=float, default=12.0, help="seconds between kills")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
