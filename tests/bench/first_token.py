"""Where the time of a first token goes, over HTTP through a whole server: microseconds of every leg of its way.

    python -m tests.bench.first_token [--config deploy/eagle.yaml] [--background 8] [--prompt-tokens 0 512]
    python -m tests.bench.first_token --gpu [--shape chain] --prompt-tokens 8 1024

Starts `aerie serve` unchanged but for stamps at the borders (`tests.bench.stamps`), then asks one request after another
and joins what was stamped: first on an idle server, then beside --background streams. A prompt of 0 tokens is a chat
about a line of text, which is rendered and tokenized; others are token ids, all different, so that no prefix is cached.
A Markdown table for each, then one JSON line.
"""

import argparse
import contextlib
import json
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deploy.bench.stream_client import request_bytes
from deploy.bench.table import table
from tests.bench.http_path import instant_config
from tests.bench.legs import LEGS, Exchange, durations, summary
from tests.bench.machine import machine
from tests.bench.served import RunningServer, model_name, running
from tests.bench.served_model import add_options, label, prompt_ids, server_config
from tests.bench.sse_client import END, EVENT, chat_body, start_load
from tests.bench.stamps import REQUEST_ID, read, write_hook

MAX_TOKENS = 4
WARM_UP = 12
PAUSE_S = 0.05  # and up to as much again, so that requests meet running steps at any time


class Client:
    """One connection, one request at a time, each with a number that no other of this server has."""

    def __init__(self, server: RunningServer, ids: range, seed: int) -> None:
        self._port = int(server.url.rpartition(":")[2])
        self._model = model_name(server)
        self._ids = ids
        self._random = random.Random(seed)
        self._number = 0
        self._connection: socket.socket | None = None

    def ask(self, prompt_tokens: int) -> Exchange:
        """Send one request, read its answer to the end."""
        number = self._number
        self._number += 1
        request = self._request(number, prompt_tokens)
        connection = self._connection or self._connect()
        sent_ns = time.monotonic_ns()
        connection.sendall(request)
        seen, read_ns = b"", 0
        while not seen.endswith(END):
            data = connection.recv(1 << 16)
            now_ns = time.monotonic_ns()
            if not data:
                raise RuntimeError(f"the server closed the connection: {seen[:300]!r}")
            seen += data
            if not read_ns and EVENT in seen:
                read_ns = now_ns
        return Exchange(number, sent_ns, read_ns)

    def pause(self) -> None:
        time.sleep(PAUSE_S * (1 + self._random.random()))

    def close(self) -> None:
        """The next request opens another connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self) -> socket.socket:
        self._connection = socket.create_connection(("127.0.0.1", self._port), timeout=60)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._connection

    def _request(self, number: int, prompt_tokens: int) -> bytes:
        text = f"Question {number}.{self._random.random()}: what lies between the harbour and the hill?"
        body, route = chat_body(self._model, text, MAX_TOKENS), "chat/completions"
        if prompt_tokens:
            del body["messages"]
            body["prompt"] = self._random.choices(self._ids, k=prompt_tokens)
            route = "completions"
        return request_bytes(self._port, body, route, request_id=f"{REQUEST_ID}{number}")


def measure(client: Client, folder: Path, prompt_tokens: int, count: int) -> dict[str, dict[str, float]]:
    """Legs of `count` requests."""
    exchanges = []
    for _ in range(count):
        client.pause()
        exchanges.append(client.ask(prompt_tokens))
    return summary(durations(read(folder), exchanges))


@contextlib.contextmanager
def background(port: int, model: str, num_streams: int) -> Iterator[None]:
    """`num_streams` streams, each with one answer after another."""
    if num_streams == 0:
        yield
        return
    with start_load(port, model, num_streams, max_tokens=600):
        time.sleep(2.0)
        yield


def trace(server: RunningServer, folder: Path, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By prompt length and number of background streams."""
    port, model = int(server.url.rpartition(":")[2]), model_name(server)
    client = Client(server, prompt_ids(arguments), arguments.seed)
    for _ in range(WARM_UP):  # on connections of their own: the HAProxy of the first second closes its connections
        client.ask(arguments.prompt_tokens[0])
        client.close()
        time.sleep(0.2)
    results: dict[str, dict[str, Any]] = {}
    for num_streams in sorted({0, arguments.background}):
        with background(port, model, num_streams):
            for prompt_tokens in arguments.prompt_tokens:
                found = measure(client, folder, prompt_tokens, arguments.count)
                results.setdefault(str(prompt_tokens), {})[str(num_streams)] = found
                print(f"prompt {prompt_tokens}, beside {num_streams}: {found['total']}", flush=True)
    client.close()
    return results


def tables(results: dict[str, dict[str, Any]]) -> list[str]:
    """One for each prompt length; columns by number of background streams."""
    lines = []
    for prompt_tokens, columns in results.items():
        what = f"{prompt_tokens} token ids" if prompt_tokens != "0" else "a chat"
        head = ["process", f"leg of the first token of {what}, us"]
        for num_streams in columns:
            where = "idle" if num_streams == "0" else f"beside {num_streams}"
            head += [f"{where}: median", "p99"]
        rows: list[Sequence[Any]] = []
        for leg in LEGS:
            if leg.end in next(iter(columns.values())):
                rows.append((leg.who, leg.title, *_cells(columns, leg.end)))
        rows.append(("", "all", *_cells(columns, "total")))
        lines += [*table(head, rows), ""]
    return lines


def _cells(columns: dict[str, Any], leg: str) -> list[float]:
    return [round(column[leg][key]) for column in columns.values() for key in ("median_us", "p99_us")]


def untraced_ms(server: RunningServer, count: int) -> float:
    """Median milliseconds of the same chat without stamps."""
    client = Client(server, range(0), seed=1)
    for _ in range(WARM_UP):
        client.ask(0)
        client.close()
        time.sleep(0.2)
    times = []
    for _ in range(count):
        client.pause()
        exchange = client.ask(0)
        times.append((exchange.read_ns - exchange.sent_ns) / 1e6)
    client.close()
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--instant", action="store_true", help="a model that takes no time: what is beside it alone")
    parser.add_argument("--background", type=int, default=8, help="streams beside the second half (0: idle only)")
    parser.add_argument("--prompt-tokens", nargs="+", type=int, default=[0], help="token ids per prompt; 0: a chat")
    parser.add_argument("--count", type=int, default=200, help="requests of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--untraced", action="store_true", help="also a server without stamps, to see what they cost")
    arguments = parser.parse_args()
    options = ["--no-haproxy"] if arguments.no_haproxy else []
    limit_s = arguments.start_limit
    with tempfile.TemporaryDirectory(prefix="first") as name:
        folder = Path(name)
        module = "tests.bench.instant_server" if arguments.instant else "deploy.cli serve"
        content = instant_config() if arguments.instant else server_config(arguments, folder)
        hook = write_hook(folder / "stamps")
        with running(module, content, *options, ready_limit_s=limit_s, python_path=[hook]) as server:
            results = trace(server, folder / "stamps", arguments)
        plain_ms = None
        if arguments.untraced:
            with running(module, content, *options, ready_limit_s=limit_s) as server:
                plain_ms = round(untraced_ms(server, arguments.count), 3)
            print(f"a chat on an idle server without stamps: {plain_ms} ms")
    print(f"\n{label(arguments)}\n", *tables(results), sep="\n")
    print(
        json.dumps(
            {
                "bench": "first_token",
                "machine": machine(),
                "model": label(arguments),
                "count": arguments.count,
                "untraced_ms": plain_ms,
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
