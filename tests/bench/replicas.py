"""Several engines behind one server: what the choice between them makes of tokens per second and of first tokens.

    python -m tests.bench replicas                   # 4 engines of the embedded pair, prompts that share prefixes
    python -m tests.bench replicas --prefixes 0      # prompts that have nothing in common

`ingress.routing: least_loaded` and `first_token` in turn, each on a Ray of its own that is told of enough cores. There
are more prefixes than one engine's cache holds, and fewer than the caches of all. Clients are a closed loop. Engines of
one machine slow each other down alike under both policies.
"""

import argparse
import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from aerie.deploy.bench.figures import percentile, table
from aerie.deploy.bench.stream_client import Answered, Pool, request_bytes
from tests.bench.served import ROOT, embedded_config
from tests.e2e.serving import Server, engine_stats, ray_cluster, serving
from tests.support.clients.closed_loop import closed_loop

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

    def requests(self, port: int, model: str, until_s: float) -> Iterator[bytes]:
        """Prompts that begin with one of the prefixes, or with nothing in common, until `time.perf_counter` says so."""
        chance = random.Random(self.seed)
        prefixes = [_tokens(chance, self.prefix_tokens) for _ in range(self.prefixes)]
        while time.perf_counter() < until_s:
            prompt = chance.choice(prefixes) if prefixes else _tokens(chance, self.prefix_tokens)
            body = {
                "model": model,
                "prompt": prompt + _tokens(chance, OWN_TOKENS),
                "max_tokens": self.answer_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            yield request_bytes(port, body, "completions")


def _tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(count)]


async def _load(work: Work, server: Server) -> list[Answered]:
    """The answers to requests of the measured part, of those that ended in it. Raises RuntimeError if one failed."""
    port = urlsplit(server.url).port
    assert port is not None
    begin_s = time.perf_counter() + work.warm_up_s
    end_s, answers, pool = begin_s + work.seconds, list[Answered](), Pool("127.0.0.1", port)
    await closed_loop(pool, work.requests(port, server.model, end_s), work.clients, answers)
    pool.close()
    faults = [answered.fault for answered in answers if answered.fault]
    if faults:
        raise RuntimeError(f"{len(faults)} of {len(answers)} requests failed: {faults[0]}")
    return [answered for answered in answers if answered.sent_s >= begin_s and answered.end_s < end_s]


def _wait_for_engines(count: int) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    while sum(stats.status == "ready" for stats in engine_stats()) < count:
        assert time.monotonic() < deadline_s, f"{count} engines were not ready after {START_LIMIT_S:g} s"
        time.sleep(0.5)


def measure(work: Work, policy: str) -> tuple[object, ...]:
    """A row of the table."""
    with ray_cluster(2 * work.engines) as port, serving(port, work.args(policy), ROOT / "deploy") as server:
        _wait_for_engines(work.engines)
        answers = asyncio.run(_load(work, server))
    first_ms = [(answered.event_s[0] - answered.sent_s) * 1e3 for answered in answers]
    return (
        policy,
        len(answers),
        sum(answered.num_tokens for answered in answers) / work.seconds,
        percentile(first_ms, 0.5),
        percentile(first_ms, 0.9),
        100 * sum(answered.num_cached for answered in answers) / sum(answered.num_prompt for answered in answers),
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
