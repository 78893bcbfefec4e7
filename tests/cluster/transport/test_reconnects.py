"""A connection that was lost stays lost: libzmq ends the process if a full socket is read after it has reconnected
(libzmq 4.3.5, issue 3937). Each case runs in a process of its own, which such an end would not survive."""

import asyncio
import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from aerie.cluster.ingress.engine_links import EngineLink
from aerie.cluster.transport import sockets
from aerie.cluster.transport.channel import _INGRESS_HIGH_WATER, _RANK_HIGH_WATER, Inbox, RankChannel, RankLink
from aerie.cluster.transport.messages import Heartbeat, TokenBatch
from aerie.cluster.transport.sockets import Transport

RECONNECT_S = 0.4  # by then ZeroMQ would have reconnected: by default it does so after 0.1 to 0.2 s
WAIT_S = 30.0


async def ingress(folder: str) -> None:
    """An ingress stands still while its engine fills the connection."""
    context = zmq.Context()
    inbox = Inbox(context, Transport(folder), "inbox")
    link = EngineLink(context, Transport(folder), inbox.endpoint)
    engine, _ = _until(inbox.receive)
    num_sent = _fill(lambda: not inbox.send(engine, TokenBatch(())), lambda: inbox.receive() or engine.is_gone)
    time.sleep(RECONNECT_S)
    async with asyncio.timeout(WAIT_S):
        while not link.lost:
            await asyncio.sleep(0.01)
    assert link.lost == "the coordinator is gone: its connection closed"
    assert _INGRESS_HIGH_WATER <= link._num_received <= num_sent


async def coordinator(folder: str) -> None:
    """A coordinator stands still while a rank fills the connection."""
    context = zmq.Context()
    rank = RankChannel(context, Transport(folder), 0, 1, "rank")
    link = RankLink(context, Transport(folder), rank.endpoint, 0)
    numbers = itertools.count()
    num_sent = _fill(lambda: rank.send(Heartbeat(0, 1, next(numbers))), rank.lost)
    time.sleep(RECONNECT_S)
    assert link.monitor.check() == "its connection closed"
    received = list(iter(link.receive, None))
    assert all(isinstance(message, Heartbeat) for message in received)
    assert _RANK_HIGH_WATER <= len(received) <= num_sent


def _fill(send: Callable[[], bool], lost: Callable[[], Any]) -> int:
    """Send whenever there is room, until the full connection is lost; return how many messages there was room for."""
    num_sent = 0

    def is_over() -> bool:
        nonlocal num_sent
        while send():
            num_sent += 1
        return num_sent > 0 and bool(lost())

    _until(is_over)
    return num_sent


def _until(look: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + WAIT_S
    while not (found := look()):
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    return found


@pytest.mark.parametrize("case", ["ingress", "coordinator"])
def test_what_came_before_a_lost_connection_is_read_and_ends_no_process(case: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.cluster.transport.test_reconnects", case, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


def test_an_endpoint_that_nobody_listens_at_shows_at_once(tmp_path: Path) -> None:
    context = zmq.Context()
    link = RankLink(context, Transport(), f"ipc://{tmp_path}/gone", 0)
    _until(lambda: link.monitor.check() == "it cannot be connected to")
    link.close()
    context.destroy()


if __name__ == "__main__":
    sockets.HEARTBEAT_MS, sockets.HEARTBEAT_TIMEOUT_MS = 50, 500
    asyncio.run({"ingress": ingress, "coordinator": coordinator}[sys.argv[1]](sys.argv[2]))
