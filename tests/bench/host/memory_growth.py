"""Memory of a served embedded pair while it answers thousands of requests: whether it grows.

    python -m tests.bench memory_growth --requests 10000 --clients 8

Plain and streamed completions and chats of random lengths; some streams are closed by the client before their end.
Prints memory by process group ten times, each time after a tenth of the requests; then one JSON line. It counts
anonymous and shared memory, each page once (`Pss_Anon` + `Pss_Shmem`), without the pages of files, such as libraries:
their share grows by 100 MB when another server with the same environment ends. KV pools are shared memory: their
pages count from the first token there, so the first points grow until the prefix cache is full.
"""

import argparse
import asyncio
import contextlib
import json
import random
import time
from pathlib import Path

import httpx

from tests.bench.machine import machine
from tests.bench.served import RunningServer, embedded_config, running

POINTS = 10
CUT_SHARE = 0.05  # probability that a client closes a reply after a line of it
READY_LIMIT_S = 600.0  # a machine of two cores that others use took 125


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


def own_mb(server: RunningServer) -> dict[str, float]:
    """Anonymous and shared memory by process group, in MB."""
    return {group: sum(own_bytes(process.pid) for process in found) / 1e6 for group, found in server.groups().items()}


def own_bytes(pid: int) -> int:
    """Of Linux's /proc, in which sizes are in kB; 0 for a process that has ended."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=8)
    arguments = parser.parse_args()
    points = []
    with running("aerie.deploy.cli serve", embedded_config(), ready_limit_s=READY_LIMIT_S) as server:
        begin_s = time.monotonic()
        for point in range(POINTS):
            asyncio.run(load(server.url, arguments.requests // POINTS, arguments.clients, point))
            used = own_mb(server)
            points.append({"requests": arguments.requests // POINTS * (point + 1), "own_mb": used})
            cells = ", ".join(f"{group} {mb:.0f}" for group, mb in used.items())
            print(f"{time.monotonic() - begin_s:6.0f} s: {sum(used.values()):.0f} MB: {cells}", flush=True)
    print(json.dumps({"bench": "memory_growth", "machine": machine(), "points": points}))


if __name__ == "__main__":
    main()
