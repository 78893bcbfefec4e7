"""Several engines behind one server, and what the choice between them makes of tokens per second and of first tokens.

    python -m tests.bench.replicas                   # 4 engines of the embedded pair, prompts that share prefixes
    python -m tests.bench.replicas --prefixes 0      # prompts that have nothing in common

`ingress.routing: least_loaded` and `first_token` in turn, each on a Ray of its own that takes this machine for one with
enough cores. There are more prefixes than one
engine's cache holds, and fewer than all engines' together. Clients are closed loops: each sends its next request when
the last one has ended. What engines of one machine cost each other is the same for both.
"""

import argparse
import asyncio
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from deploy.bench.table import table
from tests.bench.served import ROOT, embedded_config
from tests.e2e.serving import Server, engine_stats, ray_cluster, serving

POLICIES = ("least_loaded", "first_token")
FIRST_TOKEN_ID, LAST_TOKEN_ID = 600, 1400  # whole words of the embedded tokenizer
OWN_TOKENS = 16
PAGE_SIZE = 16
START_LIMIT_S = 300.0


@dataclass(frozen=True)
class Work:
    """prefixes: beginnings that prompts share, 0 for none. clients: in all."""

    engines: int = 4
    prefixes: int = 16
    prefix_tokens: int = 384
    answer_tokens: int = 8
    clients: int = 8
    warm_up_s: float = 20.0
    seconds: float = 40.0
    seed: int = 1

    def args(self, policy: str) -> dict[str, Any]:
        """deploy/eagle.yaml's, with engines of one worker each, whose caches hold two fifths of the prefixes."""
        args: dict[str, Any] = embedded_config()["applications"][0]["args"]
        args["parallel"] = {"tensor_parallel": 1, "replicas": self.engines}
        pages = (self.prefix_tokens + OWN_TOKENS + 4 * self.answer_tokens) // PAGE_SIZE + 1
        args["cache"] = {"page_size": PAGE_SIZE, "num_pages": pages * max(4, self.prefixes * 2 // 5)}
        args["scheduler"] = {**args["scheduler"], "max_running": 4}
        args["ingress"] = {"num_replicas": 1, "routing": policy}
        return args

    def prompts(self, chance: random.Random) -> list[list[int]]:
        return [_tokens(chance, self.prefix_tokens) for _ in range(self.prefixes)]


@dataclass
class Seen:
    """Of the measured part."""

    first_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_cached: int = 0
    num_prompt: int = 0


def _tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(count)]


async def _client(work: Work, http: httpx.AsyncClient, model: str, number: int, begin_s: float, seen: Seen) -> None:
    prefixes = work.prompts(random.Random(work.seed))
    chance = random.Random(f"{work.seed} {number}")
    while (sent_s := time.perf_counter()) < begin_s + work.seconds:
        prompt = chance.choice(prefixes) if prefixes else _tokens(chance, work.prefix_tokens)
        body = {
            "model": model,
            "prompt": prompt + _tokens(chance, OWN_TOKENS),
            "max_tokens": work.answer_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        first_s, usage = await _ask(http, body)
        if sent_s >= begin_s and time.perf_counter() < begin_s + work.seconds:
            seen.first_s.append(first_s - sent_s)
            seen.num_tokens += usage["completion_tokens"]
            seen.num_prompt += usage["prompt_tokens"]
            seen.num_cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def _ask(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """When the first token came, and the answer's usage."""
    first_s, usage = 0.0, {}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/completions", json=body | options) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                first_s = first_s or time.perf_counter()
                document = httpx.Response(200, content=line.removeprefix("data: ")).json()
                usage = document.get("usage") or usage
    return first_s, usage


async def _load(work: Work, server: Server) -> Seen:
    seen, model = Seen(), server.model
    begin_s = time.perf_counter() + work.warm_up_s
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
        await asyncio.gather(*(_client(work, http, model, n, begin_s, seen) for n in range(work.clients)))
    return seen


def _wait_for_engines(count: int) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    while sum(stats.status == "ready" for stats in engine_stats()) < count:
        assert time.monotonic() < deadline_s, f"{count} engines were not ready after {START_LIMIT_S:g} s"
        time.sleep(0.5)


def measure(work: Work, policy: str) -> tuple[object, ...]:
    """A row of the table."""
    with ray_cluster(2 * work.engines) as port, serving(port, work.args(policy), ROOT / "deploy") as server:
        _wait_for_engines(work.engines)
        seen = asyncio.run(_load(work, server))
    first_ms = sorted(seconds * 1e3 for seconds in seen.first_s)
    return (
        policy,
        len(first_ms),
        seen.num_tokens / work.seconds,
        statistics.median(first_ms),
        first_ms[int((len(first_ms) - 1) * 0.9)],
        100 * seen.num_cached / max(1, seen.num_prompt),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Work()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--rounds", type=int, default=1, help="of both policies, one after the other")
    arguments = vars(parser.parse_args())
    rounds = arguments.pop("rounds")
    work = Work(**arguments)
    rows = [measure(work, policy) for _ in range(rounds) for policy in POLICIES]
    print(work)
    head = ["routing", "requests", "tokens/s", "TTFT p50 ms", "TTFT p90 ms", "prompt tokens cached, %"]
    print("\n".join(table(head, rows)))


if __name__ == "__main__":
    main()
