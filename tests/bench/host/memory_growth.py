"""Memory of a served embedded pair while it answers thousands of requests: whether it grows.

    python -m tests.bench memory_growth --requests 10000 --clients 8

Plain and streamed completions and chats of random lengths; some streams are closed by the client before their end.
Prints PSS by process group ten times, each time after a tenth of the requests; then one JSON line.
"""

import argparse
import asyncio
import json
import random
import time

import httpx

from tests.bench.machine import machine
from tests.bench.served import RunningServer, embedded_config, running

POINTS = 10
CUT_SHARE = 0.05  # probability that a client closes a reply after a line of it


async def ask(client: httpx.AsyncClient, rng: random.Random) -> None:
    """One request, streamed or not; it may be ended early. Raises for a status other than 200."""
    words = " ".join(str(rng.randrange(1000)) for _ in range(rng.randint(1, 60)))
    prompts = {"completions": {"prompt": words}, "chat/completions": {"messages": [{"role": "user", "content": words}]}}
    route = rng.choice(list(prompts))
    options = {"max_tokens": rng.randint(1, 12), "stream": rng.random() < 0.5, "seed": rng.randrange(1000)}
    async with client.stream("POST", f"/v1/{route}", json=options | prompts[route], timeout=120) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for _ in reply.aiter_lines():
            if rng.random() < CUT_SHARE:
                return


async def load(url: str, num_requests: int, num_clients: int, seed: int) -> None:
    """`num_requests` by so many clients at once."""
    left = iter(range(num_requests))

    async def client(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        async with httpx.AsyncClient(base_url=url) as http:
            for _ in left:
                await ask(http, rng)

    await asyncio.gather(*(client(number) for number in range(num_clients)))


def pss_mb(server: RunningServer) -> dict[str, float]:
    """PSS by process group: pages that several processes share count once."""
    return {
        group: sum(process.memory_full_info().pss for process in processes) / 1e6
        for group, processes in server.groups().items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=8)
    arguments = parser.parse_args()
    points = []
    with running("aerie.deploy.cli serve", embedded_config()) as server:
        begin_s = time.monotonic()
        for point in range(POINTS):
            asyncio.run(load(server.url, arguments.requests // POINTS, arguments.clients, point))
            used = pss_mb(server)
            points.append({"requests": arguments.requests // POINTS * (point + 1), "pss_mb": used})
            cells = ", ".join(f"{group} {mb:.0f}" for group, mb in used.items())
            print(f"{time.monotonic() - begin_s:6.0f} s: {sum(used.values()):.0f} MB: {cells}", flush=True)
    print(json.dumps({"bench": "memory_growth", "machine": machine(), "points": points}))


if __name__ == "__main__":
    main()
