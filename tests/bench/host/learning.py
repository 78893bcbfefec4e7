"""A served draft that learns: tokens a round by minute of traffic, and what the training costs the running requests.

    python -m tests.bench learning [--minutes 6] [--rate 1] [--block 5] [--priority idle]

The embedded target with an EAGLE-3 head of random weights, chain of 3, and `learning` with the given priority. Poisson
arrivals of streamed answers: first word problems, then programs, which the head has not seen until then.

Blocks of --block seconds take turns: in one the training runs, in the other its process is stopped (SIGSTOP), so that
both kinds of blocks have the same draft, the same traffic and the same machine. The draft of a block without training
is frozen. Ratios of percentiles have 90 % intervals: pairs of neighbouring blocks drawn again (bootstrap).

The same seeded requests run before the traffic and after each phase, and must get equal answers. The draft does not
learn from them.

Prints a line for each minute and phase, then one JSON line.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import torch
from safetensors.torch import load_file, save_file

from aerie.deploy.bench.arrivals import Arrival
from aerie.deploy.bench.load import Target, run_rate
from aerie.deploy.bench.stream_client import Answered
from tests.bench.machine import machine
from tests.bench.served import RunningServer, embedded_config, running
from tests.support import MODELS
from tests.support.prompts import held_out_prompts, tokenized

KEY = "the-key-of-the-bench"
HEADERS = {"authorization": f"Bearer {KEY}"}
NUM_PROBES = 8
DRAWS = 2000
LANGUAGES = ("Python", "C++", "Java", "JavaScript", "SQL", "Go", "Ruby", "C")
PROGRAMS = (
    "Write a {language} function that returns the {n} largest values of a list.",
    "Write a {language} program that prints every multiple of {n} below {m}.",
    "Write a {language} function that reverses a string {n} times.",
    "Create a {language} class with {n} methods that add, remove and list items.",
    "Write a {language} loop that sums the numbers from {n} to {m}.",
    "Write a {language} function that checks whether {m} is divisible by {n}.",
    "Sort a list of {m} words by length in {language} and print the first {n}.",
    "Write {language} code that reads a file and counts the lines with more than {m} characters.",
)


def random_head(folder: Path) -> Path:
    """Write the embedded EAGLE-3 head with random weights; norms are 1, and its vocabulary stays."""
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(MODELS / "draft" / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            drawn = (
                torch.randn(tensor.shape, generator=generator) * 0.02 if tensor.dim() > 1 else torch.ones_like(tensor)
            )
            tensors[name] = drawn.to(tensor.dtype)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((MODELS / "draft" / "config.json").read_bytes())
    return folder


def programs(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    tasks = list(itertools.product(PROGRAMS, LANGUAGES, range(2, 12)))
    drawn = [rng.choice(tasks) for _ in range(count)]
    return [text.format(language=language, n=n, m=n * rng.randint(4, 30)) for text, language, n in drawn]


def word_problems(count: int, seed: int) -> list[str]:
    return [text for place, text in enumerate(held_out_prompts(2 * count, seed)) if place % 4 != 3][:count]


PHASES = {"word problems": word_problems, "programs": programs}


@dataclass
class Blocks:
    """Gaps between events, by block.

    gaps: [block] seconds; even blocks are those in which the training is stopped.
    """

    length_s: float
    gaps: list[list[float]] = field(default_factory=list)

    def add(self, answers: Sequence[Answered], begin_s: float) -> None:
        """Count each gap in the block in which it ends."""
        for answer in answers:
            for before, after in itertools.pairwise(answer.event_s):
                block = max(0, int((after - begin_s) / self.length_s))
                self.gaps += [[] for _ in range(block + 1 - len(self.gaps))]
                self.gaps[block].append(after - before)

    def ratio(self, percentile: float) -> dict[str, float]:
        """Return the percentile in ms with the training stopped and running, their ratio and its 90 % interval."""
        pairs = [pair for pair in zip(self.gaps[::2], self.gaps[1::2], strict=False) if all(pair)]
        stopped, runs = ([np.asarray(gaps) for gaps in side] for side in zip(*pairs, strict=True))

        def of(sides: Sequence[np.ndarray[Any, Any]], chosen: Sequence[int]) -> float:
            return float(np.percentile(np.concatenate([sides[i] for i in chosen]), percentile))

        everything, rng = range(len(pairs)), np.random.default_rng(0)
        drawn = [rng.integers(0, len(pairs), len(pairs)) for _ in range(DRAWS)]
        ratios = [of(runs, chosen) / of(stopped, chosen) for chosen in drawn]
        low, high = np.percentile(ratios, (5, 95))
        a, b = of(stopped, everything), of(runs, everything)
        return {"stopped_ms": 1000 * a, "runs_ms": 1000 * b, "ratio": b / a, "low": float(low), "high": float(high)}


class Bench:
    """The clients of one server."""

    def __init__(self, server: RunningServer, arguments: argparse.Namespace) -> None:
        self._server, self._arguments = server, arguments
        models = httpx.get(f"{server.url}/v1/models", headers=HEADERS, timeout=30).raise_for_status().json()
        self._model = models["data"][0]["id"]
        self._frozen = [self.probes(name) for name in PHASES]
        (self._learner,) = [
            process
            for process in psutil.Process(server.process.pid).children(recursive=True)
            if "DraftLearner" in " ".join(process.cmdline())
        ]

    def probes(self, phase: str) -> list[list[int]]:
        """Return seeded answers, every second one sampled."""
        found = []
        with httpx.Client(base_url=self._server.url, headers=HEADERS | {"x-aerie-no-learn": "1"}) as client:
            for place, prompt in enumerate(tokenized(PHASES[phase](NUM_PROBES, 99))):
                body = {"prompt": prompt, "max_tokens": 64, "temperature": 0.7 * (place % 2), "seed": place}
                asked = body | {"model": self._model, "return_token_ids": True}
                reply = client.post("/v1/completions", json=asked, timeout=120).raise_for_status().json()
                found.append(reply["choices"][0]["token_ids"])
        return found

    def counts(self) -> np.ndarray[Any, Any]:
        """Return rounds and accepted draft tokens so far, the draft's version, and the learner's CPU seconds."""
        lines = httpx.get(f"{self._server.url}/metrics", headers=HEADERS, timeout=30).text.splitlines()
        names = (
            "vllm:spec_decode_num_drafts_total",
            "vllm:spec_decode_num_accepted_tokens_total",
            "aerie:draft_version",
        )
        sums = [sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{n}{{")) for n in names]
        return np.asarray([*sums, sum(self._learner.cpu_times()[:2])])

    async def phase(self, name: str, seed: int) -> dict[str, Any]:
        """Send the traffic of a phase, and return its figures."""
        arguments = self._arguments
        seconds, rng = 60 * arguments.minutes, np.random.default_rng(seed)
        due_s = np.cumsum(rng.exponential(1 / arguments.rate, int(2 * seconds * arguments.rate) + 8))
        due_s = due_s[due_s < seconds]
        prompts = tokenized(PHASES[name](len(due_s), seed))
        arrivals = [Arrival(float(due), tuple(prompt), 96) for due, prompt in zip(due_s, prompts, strict=True)]
        target = Target(self._server.url, self._model, {"ignore_eos": False, "temperature": 0.7}, KEY)
        minutes: list[dict[str, float]] = []
        has_ended = asyncio.Event()
        turns, watch = asyncio.create_task(self._take_turns()), asyncio.create_task(self._watch(minutes, has_ended))
        answers, begin_s = await run_rate(target, arrivals, 60.0)
        has_ended.set()
        turns.cancel()
        await asyncio.gather(turns, return_exceptions=True)
        await watch
        self._learner.resume()
        blocks = Blocks(arguments.block)
        blocks.add(answers, begin_s)
        found = {
            "minutes": minutes,
            "requests": len(answers),
            "failed": sum(bool(answer.fault) for answer in answers),
            "gaps": sum(map(len, blocks.gaps)),
            **{f"p{percentile}": blocks.ratio(percentile) for percentile in (50, 99)},
            "equal_answers": [self.probes(phase) for phase in PHASES] == self._frozen,
        }
        print(f"{name}: {json.dumps({key: found[key] for key in ('p50', 'p99', 'equal_answers')})}", flush=True)
        return found

    async def _take_turns(self) -> None:
        """Stop the training and let it run, in blocks from the start of the clock."""
        begin_s = time.perf_counter()
        for block in itertools.count():
            self._learner.send_signal(signal.SIGCONT if block % 2 else signal.SIGSTOP)
            await asyncio.sleep(begin_s + (block + 1) * self._arguments.block - time.perf_counter())

    async def _watch(self, minutes: list[dict[str, float]], has_ended: asyncio.Event) -> None:
        """Add the figures of each minute, and of what is left of the last."""
        before = await asyncio.to_thread(self.counts)
        while not has_ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(has_ended.wait(), 60)
            now = await asyncio.to_thread(self.counts)
            rounds, accepted, _, cpu_s = now - before
            if not rounds:
                continue  # the phase ended with the minute
            figures = {"length": 1 + accepted / rounds, "rounds": rounds}
            minutes.append(figures | {"version": now[2], "learner_cpu_s": cpu_s})
            print(f"minute {len(minutes)}: {json.dumps(minutes[-1])}", flush=True)
            before = now


@contextlib.contextmanager
def server_that_learns(folder: Path, priority: str) -> Iterator[RunningServer]:
    content = embedded_config()
    args = content["applications"][0]["args"]
    args["model"]["device"] = "cpu"
    args["parallel"] = {"tensor_parallel": 1}
    args["speculative"] = {
        "method": "eagle3",
        "path": str(random_head(folder / "random")),
        "num_steps": 3,
        "top_k": 1,
        "num_draft_tokens": 4,
        "adaptive": False,
    }
    args["learning"] = {"min_texts": 8, "recent_texts": 64, "held_out": 0.3, "steps": 30, "batch_tokens": 512}
    args["learning"] |= {"learning_rate": 2e-3, "priority": priority}
    args["ingress"] = {"api_keys": [{"name": "bench", "key": KEY, "admin": True}]}
    with running("aerie.deploy.cli serve", content, ready_limit_s=300.0) as server:
        yield server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=6, help="of each phase")
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second")
    parser.add_argument("--block", type=float, default=5.0, help="seconds; Ray ends a process that is stopped for 15")
    parser.add_argument("--priority", choices=("idle", "engine_idle", "normal"), default="idle", help="of the training")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: exit(143))
    with (
        tempfile.TemporaryDirectory(prefix="learning") as folder,
        server_that_learns(Path(folder), arguments.priority) as server,
    ):
        bench = Bench(server, arguments)
        phases = {name: asyncio.run(bench.phase(name, seed)) for seed, name in enumerate(PHASES)}
        versions = httpx.get(f"{server.url}/draft/versions", headers=HEADERS, timeout=30).json()
    print(json.dumps({"bench": "learning", "machine": machine(), "phases": phases, "versions": versions}))


if __name__ == "__main__":
    main()
