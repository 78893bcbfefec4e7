"""Messages and links over real sockets: what may be lost, what must be noticed, what is refused."""

import multiprocessing
import time

import pytest
import zmq

from aerie.cluster.transport import channel
from aerie.cluster.transport.channel import Inbox, RankChannel, RankLink, connect_engine
from aerie.cluster.transport.encoding import BadMessageError, decode, decode_numbered, encode
from aerie.cluster.transport.messages import (
    Abort,
    EngineState,
    GenerateRequest,
    Heartbeat,
    RankFailure,
    Refusal,
    Refused,
    Stop,
    Subscribe,
    TokenBatch,
    TokenDelta,
)
from aerie.cluster.transport.sockets import PeerMonitor, Transport, new_keys, open_socket
from aerie.workers.scheduling.plan import Chunk, SamplingParams, SlotInit, StepPlan, StepResult, TokenLogprobs, pack_i32
from tests.support.cluster import until


@pytest.fixture
def context():
    """Its sockets wait for a message for ten seconds at most."""
    context = zmq.Context()
    context.setsockopt(zmq.RCVTIMEO, 10_000)
    yield context
    context.destroy(linger=0)


def plan(step, epoch=1):
    return StepPlan(epoch, step, pack_i32([0, 3]), 1, 77)


def receive(channel):
    """The next message within a second."""
    deadline = time.monotonic() + 30
    while (message := channel.receive()) is None:
        assert time.monotonic() < deadline, "nothing came"
        channel.wait(10)
    return message


@pytest.mark.parametrize(
    "message",
    [
        StepPlan(
            2,
            5,
            pack_i32([1]),
            1,
            9,
            1,
            b"\1\0",
            pack_i32([0, 0, 1]),
            (SlotInit(0, 4, 5, 9, SamplingParams(4, seed=2**64 - 1, logit_bias={3: -1.5}, stop_token_ids=(2,))),),
            (Chunk(0, 4, pack_i32([7]), -1),),
        ),
        StepResult(
            2, 5, pack_i32([1]), pack_i32([9]), b"\x01", pack_i32([-1]), {0: (TokenLogprobs(-0.5, (9,), (-0.5,)),)}
        ),
        Heartbeat(1, 2, 3, 0.5),
        RankFailure(1, 2, "Traceback"),
        Stop(),
        GenerateRequest("a", pack_i32([1, 2]), SamplingParams(max_tokens=1), pack_i32([3])),
        Abort("a"),
        Subscribe(),
        TokenBatch((TokenDelta("a", (1, 2), "stop"),)),
        Refused("a", Refusal("queue_full", "later")),
        EngineState("e", "ready", added=b"digest"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_every_message_survives_the_way(message):
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "raw, complaint",
    [
        (b"", "message b'': Input data was truncated"),
        (b"zabc", "Expected `array`, got `int`"),
        (b"\x90", "Expected `array` of at least length 1, got 0"),
        (b"\x91\xa5Abort", "Expected `array` of at least length 2, got 1"),
        (b"\x92\xa5Other\xa1a", "Invalid value 'Other'"),
        (encode(Abort("a"))[:-1], "Abort.*Input data was truncated"),
    ],
)
def test_other_bytes_are_refused(raw, complaint):
    with pytest.raises(BadMessageError, match=complaint):
        decode(raw)


def test_a_plan_for_128_running_requests_is_under_a_kilobyte():
    drafting, updates = b"\1" * 128, pack_i32(range(24 * 3))
    assert len(encode(StepPlan(1, 10**6, pack_i32(range(128)), 1, 10**5, 1, drafting, updates))) < 1000


def test_plans_sent_before_the_rank_reads_arrive_in_order(context, tmp_path):
    transport = Transport(folder=str(tmp_path))
    channel = RankChannel(context, transport, 0, 1, "r0")
    link = RankLink(context, transport, channel.endpoint, 0)
    for step in range(5):
        assert link.send(encode(plan(step)))
    assert [receive(channel).step for _ in range(5)] == list(range(5))
    channel.close()
    link.close()


def test_plans_of_another_epoch_are_dropped_and_a_gap_is_an_error(context, tmp_path):
    transport = Transport(folder=str(tmp_path))
    channel = RankChannel(context, transport, 1, 7, "r1")
    link = RankLink(context, transport, channel.endpoint, 1)
    for each in (plan(0, epoch=6), plan(0, epoch=7), plan(5, epoch=8), plan(2, epoch=7)):
        link.send(encode(each))
    assert receive(channel).step == 0
    with pytest.raises(BadMessageError, match="rank 1 got step 2, expected 1"):
        receive(channel)
    channel.close()
    link.close()


def test_a_rank_that_reads_nothing_never_blocks_the_coordinator(context, tmp_path):
    link = RankLink(context, Transport(folder=str(tmp_path)), f"ipc://{tmp_path}/nobody", 0)
    started = time.monotonic()
    sent = 0
    while link.send(encode(plan(sent))):
        sent += 1
    assert sent == 1024 and time.monotonic() - started < 30
    link.close()


def test_heartbeats_before_the_coordinator_connects_go_nowhere(context, tmp_path):
    channel = RankChannel(context, Transport(folder=str(tmp_path)), 0, 1, "r0")
    assert not channel.send(Heartbeat(0, 1, 0))
    channel.close()


def test_why_a_rank_ends_is_received_although_it_closes_at_once(context, tmp_path):
    """A text that exceeds the sockets' buffers, so that most of it leaves after `close`."""
    transport, text = Transport(folder=str(tmp_path)), "Traceback" * 500_000
    channel = RankChannel(context, transport, 0, 1, "r0")
    link = RankLink(context, transport, channel.endpoint, 0)
    link.send(encode(plan(0)))
    assert receive(channel).step == 0
    channel.fail(text)
    channel.close()
    assert link.socket.poll(30_000), "the reason is lost"
    assert link.receive() == RankFailure(0, 1, text)
    link.close()


def die_connected(folder, bound):
    context = zmq.Context()
    channel = RankChannel(context, Transport(folder=folder), 0, 1, "r0")
    bound.set()
    while True:
        channel.wait(1000)


def test_a_killed_rank_is_noticed_within_milliseconds(context, tmp_path):
    spawn = multiprocessing.get_context("spawn")
    bound = spawn.Event()
    process = spawn.Process(target=die_connected, args=(str(tmp_path), bound), daemon=True)
    process.start()
    assert bound.wait(30)
    link = RankLink(context, Transport(), f"ipc://{tmp_path}/r0", 0)
    until(lambda: link.monitor.check() is None and link.monitor.was_connected, timeout_s=30)
    process.kill()
    # 4 ms when the machine is quiet; the bound is for a machine with many more jobs than cores
    assert link.monitor.socket.poll(30_000), "the death was not noticed"
    assert link.monitor.check() == "its connection closed"
    link.close()
    process.join()


def next_request(inbox):
    """The ingress's link on which the next message came, and the message."""
    assert inbox.socket.poll(5000), "nothing came"
    link, raw = inbox.receive()
    return link, decode(raw)


def test_an_ingress_gets_everything_in_order_on_the_connection_on_which_it_asked(context, tmp_path):
    transport = Transport(folder=str(tmp_path))
    inbox = Inbox(context, transport, "in")
    ends = {}
    for name in ("a", "b"):
        socket, monitor = connect_engine(context, transport, inbox.endpoint)
        socket.send(encode(Abort(name)))
        link, message = next_request(inbox)
        ends[name] = (socket, monitor, link)
        assert message == Abort(name)
    messages = [
        TokenBatch((TokenDelta("q", (1, 2)),)),
        Refused("r", Refusal("queue_full", "")),
        EngineState("e", "ready"),
    ]
    for message in messages:
        for _, _, link in ends.values():
            assert not inbox.send(link, message)
    for socket, monitor, _ in ends.values():
        assert [decode_numbered(socket.recv(), number) for number in range(3)] == messages
        monitor.close()
        socket.close()
    inbox.close()


def test_a_message_for_an_ingress_that_has_gone_says_so_and_its_successor_is_another(context, tmp_path):
    transport = Transport(folder=str(tmp_path))
    inbox = Inbox(context, transport, "in")
    links = []
    for _ in range(2):
        socket, monitor = connect_engine(context, transport, inbox.endpoint)
        socket.send(encode(Subscribe()))
        links.append(next_request(inbox)[0])
        assert inbox.send(links[-1], TokenBatch(())) == ""
        monitor.close()
        socket.close()
        until(lambda: inbox.send(links[-1], TokenBatch(())) == "its connection closed")
    assert all(link.is_gone for link in links) and links[0] is not links[1] and not inbox.links
    inbox.close()


def test_an_ingress_that_does_not_read_finds_the_gap(context, tmp_path, monkeypatch):
    """Few messages, so that all are read within the 5 s after which a full socket misses its peer's heartbeats."""
    monkeypatch.setattr(channel, "_INGRESS_HIGH_WATER", 50)
    transport = Transport(folder=str(tmp_path))
    inbox = Inbox(context, transport, "in")
    socket, monitor = connect_engine(context, transport, inbox.endpoint)
    socket.send(encode(Subscribe()))
    link, _ = next_request(inbox)
    batch = TokenBatch((TokenDelta("q", tuple(range(1000))),) * 30)  # the kernel buffers some 200 KB of them
    num_sent = 0
    while not (reason := inbox.send(link, batch)) and num_sent < 1000:
        num_sent += 1
    assert reason == "it does not read its messages" and not link.is_gone and num_sent >= 50
    for number in range(num_sent):
        assert decode_numbered(socket.recv(), number) == batch
    until(lambda: not inbox.send(link, TokenBatch(())))
    with pytest.raises(BadMessageError, match=f"message {num_sent} was lost: {link.num_messages - 1} came"):
        decode_numbered(socket.recv(), num_sent)
    monitor.close()
    socket.close()
    inbox.close()


def test_tcp_needs_keys_and_the_right_ones(context):
    with pytest.raises(ValueError, match="cannot bind in: tcp is never left open; give Transport.keys"):
        Inbox(context, Transport(node_ip="127.0.0.1"), "in")
    with pytest.raises(ValueError, match="127.0.0.1:1.*give Transport.keys"):
        connect_engine(context, Transport(), "tcp://127.0.0.1:1")
    keys = new_keys()
    inbox = Inbox(context, Transport(node_ip="127.0.0.1", keys=keys), "in")
    stranger, strangers = connect_engine(context, Transport(keys=new_keys()), inbox.endpoint)
    friend, friends = connect_engine(context, Transport(keys=keys), inbox.endpoint)
    stranger.send(encode(Abort("stranger")))
    friend.send(encode(Abort("friend")))
    link, message = next_request(inbox)
    assert message == Abort("friend")
    assert not inbox.socket.poll(200), "a stranger's message was accepted"
    strangers.check()
    assert not strangers.was_connected
    assert not inbox.send(link, TokenBatch(())) and decode_numbered(friend.recv(), 0) == TokenBatch(())
    for monitor, socket in ((strangers, stranger), (friends, friend)):
        monitor.close()
        socket.close()
    inbox.close()


def test_addresses_that_cannot_be_are_refused_with_a_remedy(context, tmp_path):
    with pytest.raises(ValueError, match="107 at most; choose a shorter folder"):
        Inbox(context, Transport(folder="/tmp/" + "x" * 100), "in")
    with pytest.raises(ValueError, match="neither folder nor node_ip; give one"):
        Inbox(context, Transport(), "in")
    with pytest.raises(ValueError, match="cannot bind r0: No such file"):
        RankChannel(context, Transport(folder=str(tmp_path / "missing")), 0, 1, "r0")
    with pytest.raises(ValueError, match="must begin with ipc:// or tcp://"):
        RankLink(context, Transport(), "r0", 0)
    for endpoint in ("inproc://x", "", "tcp://"):
        with pytest.raises(ValueError, match="endpoint="):
            connect_engine(context, Transport(keys=new_keys()), endpoint)


def test_a_monitor_keeps_the_first_reason(context, tmp_path):
    listener = open_socket(context, zmq.PULL, 5)
    endpoint = Transport(folder=str(tmp_path)).bind(listener, "x")
    socket = open_socket(context, zmq.PUSH, 5)
    monitor = PeerMonitor(socket)
    Transport().connect(socket, endpoint)
    until(lambda: monitor.check() is None and monitor.was_connected)
    listener.close()
    until(lambda: monitor.check() is not None)
    assert monitor.check() == monitor.check() == "its connection closed"
    monitor.close()
    socket.close()
