"""A ZeroMQ socket in an asyncio loop: nothing is lost, nothing waits."""

import asyncio
import logging
import threading

import pytest
import zmq

from aerie.cluster.transport.channel import Listener
from aerie.cluster.transport.sockets import open_socket

WAIT_S = 10.0


@pytest.fixture
def pair(tmp_path):
    """A ROUTER that listens, as it is, and a DEALER connected to it."""
    context = zmq.Context()
    ours, theirs = open_socket(context, zmq.DEALER, 10_000), open_socket(context, zmq.ROUTER, 10_000)
    theirs.bind(f"ipc://{tmp_path}/s")
    ours.connect(f"ipc://{tmp_path}/s")
    yield ours, theirs
    context.destroy(linger=0)


async def arrived(seen: list[bytes], count: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while len(seen) < count:
            await asyncio.sleep(0.001)


async def test_messages_come_in_order_however_many_at_once(pair):
    ours, theirs = pair
    seen: list[bytes] = []
    listener = Listener(ours, seen.append)
    assert listener.send(b"here")
    name, _ = await asyncio.to_thread(theirs.recv_multipart)
    for number in range(1000):  # more than one turn takes
        theirs.send_multipart((name, b"%d" % number))
    await arrived(seen, 1000)
    assert seen == [b"%d" % number for number in range(1000)]
    listener.close()


async def test_messages_that_were_there_before_are_read(pair):
    ours, theirs = pair
    ours.send(b"here")
    name, _ = theirs.recv_multipart()
    theirs.send_multipart((name, b"early"))
    assert ours.poll(5000)
    seen: list[bytes] = []
    listener = Listener(ours, seen.append)
    await arrived(seen, 1)
    assert seen == [b"early"]
    listener.close()


async def test_no_answer_is_lost_to_sending(pair):
    """Sending looks at the socket's events too, which the descriptor shows only once: 2,000 answers that come while
    other requests are sent."""
    ours, theirs = pair
    seen: list[bytes] = []
    listener = Listener(ours, seen.append)

    def echo() -> None:
        for _ in range(2000):
            theirs.send_multipart(theirs.recv_multipart())

    thread = threading.Thread(target=echo, daemon=True)
    thread.start()
    for number in range(2000):
        assert listener.send(b"%d" % number)
        if number % 7 == 0:
            await asyncio.sleep(0)
    await arrived(seen, 2000)
    thread.join(WAIT_S)
    assert seen == [b"%d" % number for number in range(2000)]
    listener.close()


async def test_message_that_cannot_be_handled_is_dropped_alone(pair, caplog):
    ours, theirs = pair
    seen: list[bytes] = []

    def handle(raw: bytes) -> None:
        if raw == b"bad":
            raise ValueError(raw)
        seen.append(raw)

    listener = Listener(ours, handle)
    listener.send(b"here")
    name, _ = await asyncio.to_thread(theirs.recv_multipart)
    with caplog.at_level(logging.ERROR):
        for raw in (b"one", b"bad", b"two"):
            theirs.send_multipart((name, raw))
        await arrived(seen, 2)
    assert seen == [b"one", b"two"] and "a message was dropped" in caplog.text
    listener.close()


async def test_closed_listener_sends_nothing_and_may_be_closed_while_it_reads(pair):
    ours, theirs = pair
    seen: list[bytes] = []

    def handle(raw: bytes) -> None:
        seen.append(raw)
        listener.close()

    listener = Listener(ours, handle)
    listener.send(b"here")
    name, _ = await asyncio.to_thread(theirs.recv_multipart)
    for _ in range(3):
        theirs.send_multipart((name, b"x"))
    await arrived(seen, 1)
    await asyncio.sleep(0.01)
    assert seen == [b"x"] and not listener.send(b"more")
    listener.close()  # a second time


async def test_peer_that_does_not_read_is_said_so(tmp_path):
    context = zmq.Context()
    socket = open_socket(context, zmq.DEALER, 5)
    socket.connect(f"ipc://{tmp_path}/nobody")
    listener = Listener(socket, lambda raw: None)
    assert [listener.send(b"x") for _ in range(6)] == [True] * 5 + [False]
    listener.close()
    context.destroy(linger=0)
