"""The process that fills masks: what one request's grammar does there, others do not notice."""

import json
import mmap
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch

from aerie.workers.scheduling.plan import Grammar, pack_i32
from aerie.workers.structured_output.compiler import Vocabulary
from aerie.workers.structured_output.mask_messages import (
    LATE,
    Advanced,
    Deadline,
    Entered,
    Fill,
    Filled,
    Notice,
    Order,
    receive,
    send,
)
from aerie.workers.structured_output.mask_process import mask_jobs
from aerie.workers.structured_output.mask_process.mask_host import MaskHost, SharedTable
from aerie.workers.structured_output.mask_process.request_grammar import RequestGrammar
from aerie.workers.structured_output.mask_table import MaskTable
from tests.support import MODELS
from tests.support.embedded import eos_token_ids

VOCAB, SLOTS = 4096, 4
VOCABULARY = Vocabulary(MODELS / "target", VOCAB)
STOPS = eos_token_ids()
QUICK = Grammar("regex", "[0-9]+", STOPS)


class Host:
    """A mask host in a thread, and the rank's ends of its sockets."""

    def __init__(self) -> None:
        self.orders, its_orders = socket.socketpair()
        self.control, its_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.table = MaskTable(SLOTS, 1, VOCAB, torch.device("cpu"))
        memory = mmap.mmap(self.table.file, self.table.shape.num_bytes)
        self.exits = list[int]()
        shared = SharedTable(memory, self.table.shape)
        self.host = MaskHost(its_orders, its_control, shared, VOCABULARY, self.exits.append)
        self.thread = threading.Thread(target=self.host.run, daemon=True)
        self.thread.start()
        self.control.settimeout(30.0)
        self.orders.settimeout(30.0)
        self._its = its_orders, its_control
        self._sequence = 0

    def enter(self, number: int, grammar: Grammar, output: list[int] | None = None) -> None:
        send(self.orders, Order(0, entered=(Entered(number, grammar, pack_i32(output or []), False),)))

    def fill(self, *numbers: int, advanced: tuple[Advanced, ...] = ()) -> int:
        """Order masks; returns the order's number."""
        self._sequence += 1
        fills = tuple(Fill(number, 1, -1, 0) for number in numbers)
        send(self.orders, Order(self._sequence, advanced=advanced, fills=fills))
        return self._sequence

    def filled(self) -> Filled:
        found = receive(self.orders, Filled)
        assert found is not None
        return found

    def notice(self) -> Notice:
        return msgspec.msgpack.decode(self.control.recv(1 << 16), type=Notice)

    def deadline(self, sequence: int, closes: bool) -> None:
        self.control.send(msgspec.msgpack.encode(Deadline(sequence, closes)))

    def close(self) -> None:
        for own in (self.orders, self.control):
            own.close()
        self.thread.join(10.0)
        deadline_s = time.monotonic() + 10.0
        while not self.exits and time.monotonic() < deadline_s:
            time.sleep(0.01)  # for the leader
        for its in self._its:
            its.close()


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.close()


class Stuck:
    """A request's mask that takes as long as the test wants; what goes on meanwhile releases Python's lock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number_of_tokens: int = 7) -> None:
        self.go_on, self._begun = threading.Event(), threading.Event()
        original = RequestGrammar.advanced_matcher

        def wait(request: RequestGrammar) -> object:
            if request.num_known == number_of_tokens:
                self._begun.set()
                self.go_on.wait(30.0)
            return original(request)

        monkeypatch.setattr(RequestGrammar, "advanced_matcher", wait)

    def wait_begun(self) -> None:
        assert self._begun.wait(30.0)


def digits(count: int) -> list[int]:
    zero = VOCABULARY.tokenizer.token_to_id("0")
    return [zero] * count


def mask_of(host: Host, row: int) -> list[int]:
    words = host.table.host_words[row].numpy()
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def test_masks_are_there(host: Host) -> None:
    host.enter(1, QUICK)
    host.enter(2, Grammar("choice", json.dumps(["да", "нет"]), STOPS))
    host.fill(1, 2)
    filled = host.filled()
    assert filled.rows == [0, 1] and filled.failures == {} and filled.num_rows == 2
    assert len(mask_of(host, 0)) > 9
    assert len(mask_of(host, 1)) == 1, "the byte that both texts begin with"


def test_a_slow_request_is_left_behind_and_its_mask_is_told_of(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck(monkeypatch)
    for number, count in ((1, 0), (2, 7), (3, 1)):
        host.enter(number, QUICK, digits(count))
    sequence = host.fill(1, 2, 3)
    stuck.wait_begun()
    host.deadline(sequence, closes=False)
    filled = host.filled()
    assert filled.rows == [0, LATE, 1]
    for _ in range(3):  # and as long as it takes: the others' steps go on
        host.fill(1, 2, 3)
        assert host.filled().rows == [0, LATE, 1]
    stuck.go_on.set()
    assert host.notice().ready == [2]
    host.enter(2, QUICK, digits(7))
    host.fill(2)
    assert host.filled().rows == [0]


def test_a_step_that_closes_leaves_all_behind_that_were_not_filled(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck(monkeypatch)
    for number, count in ((1, 7), (2, 0)):
        host.enter(number, QUICK, digits(count))
    sequence = host.fill(1, 2)
    stuck.wait_begun()
    host.deadline(sequence, closes=True)
    assert host.filled().rows == [LATE, LATE]
    assert host.notice().ready == [2]
    stuck.go_on.set()
    assert host.notice().ready == [1]


def test_a_hurry_for_a_step_that_is_over_changes_nothing(host: Host) -> None:
    host.enter(1, QUICK)
    sequence = host.fill(1)
    assert host.filled().rows == [0]
    host.deadline(sequence, closes=True)
    host.fill(1)
    assert host.filled().rows == [0]


def test_whatever_fails_fails_alone(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = RequestGrammar.fill

    def broken(request: RequestGrammar, *arguments: object) -> bool:
        if request.num_known == 3:
            raise UnicodeDecodeError("utf-8", b"\xd0", 0, 1, "unexpected end of data")
        return fill(request, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(RequestGrammar, "fill", broken)
    for number, count in ((1, 0), (2, 3), (3, 1)):
        host.enter(number, QUICK, digits(count))
    host.fill(1, 2, 3)
    filled = host.filled()
    assert filled.rows == [0, LATE, 1]
    assert list(filled.failures) == [1] and "UnicodeDecodeError" in filled.failures[1].message
    assert not filled.failures[1].is_invalid, "it is no fault of the request"


def test_one_that_leaves_its_grammar_fails(host: Host) -> None:
    host.enter(1, QUICK, VOCABULARY.tokenizer.encode("x", add_special_tokens=False).ids)
    host.fill(1)
    assert "left its grammar" in host.filled().failures[0].message


def test_a_mask_has_a_limit(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_jobs, "MASK_WALL_LIMIT_S", 1.0)
    stuck = Stuck(monkeypatch)
    host.enter(1, QUICK, digits(7))
    sequence = host.fill(1)
    stuck.wait_begun()
    host.deadline(sequence, closes=True)
    assert host.filled().rows == [LATE]
    notice = host.notice()
    assert list(notice.failures) == [1] and notice.failures[1].is_invalid
    host.thread.join(10.0)
    assert not host.thread.is_alive(), "what cannot be stopped ends with the process"
    stuck.go_on.set()


def test_tokens_that_were_told_twice_are_taken_once(host: Host) -> None:
    host.enter(1, Grammar("regex", "[0-9]{4}", STOPS))
    host.fill(1)
    host.filled()
    host.fill(1, advanced=(Advanced(1, digits(2)),))
    host.filled()
    host.enter(1, Grammar("regex", "[0-9]{4}", STOPS), digits(3))
    host.fill(1, advanced=(Advanced(1, digits(1)),))
    assert host.filled().rows == [0]
    assert mask_of(host, 0) == sorted(STOPS)
