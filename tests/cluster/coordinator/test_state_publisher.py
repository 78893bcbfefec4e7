"""What engines tell of themselves: bounded, complete in the end, and only while somebody listens."""

import math
from typing import cast

import numpy as np

from attention.kv_cache.prefix_digests import prompt_digests, split_digests
from cluster.coordinator import state_publisher
from cluster.coordinator.state_publisher import LEASE_S, PERIOD_S, StatePublisher
from cluster.transport.messages import EngineState, Subscribe
from tests.support.simulation.routing import Engine, SimulatedEngine
from tests.support.simulation.scheduler import Clock
from workers.scheduling.scheduler import Scheduler


class Rig:
    def __init__(self, num_pages: int = 50) -> None:
        self.clock = Clock()
        self.engine = SimulatedEngine(Engine(page_size=4, num_pages=num_pages), self.clock)
        self.sent: dict[bytes, list[EngineState]] = {b"x": [], b"y": []}
        self.publisher = StatePublisher(
            "e", cast(Scheduler, self.engine), self.clock, lambda sender, state: self.sent[sender].append(state)
        )

    def cache(self, tokens: np.ndarray) -> list[bytes]:
        """All pages of `tokens` come into the cache; their digests."""
        pages = self.engine.allocator.allocate(len(tokens) // 4)
        self.engine.prefix_cache.insert(tokens, pages)
        self.engine.allocator.release(pages)
        return prompt_digests(np.append(tokens, np.int32(0)), 4, 0)

    def publish(self) -> None:
        self.publisher.publish("ready", "", False, 0.0)

    def known(self, sender: bytes = b"x") -> set[bytes]:
        """What a subscriber knows who has heard everything."""
        known: set[bytes] = set()
        for state in self.sent[sender]:
            known = (set() if state.sequence == 0 else known) | set(split_digests(state.added))
            known -= set(split_digests(state.removed))
        return known


def test_nobody_listens_and_nothing_is_due() -> None:
    rig = Rig()
    rig.publisher.changed()
    rig.publisher.received(b"x")
    rig.publish()
    assert rig.publisher.due_s == math.inf and not rig.sent[b"x"]


def test_who_comes_later_knows_the_same_in_the_end() -> None:
    rig = Rig()
    rig.publisher.subscribe(b"x", Subscribe(True))
    first = rig.cache(np.arange(20, dtype=np.int32))
    rig.publish()
    rig.publisher.subscribe(b"y", Subscribe(True))
    second = rig.cache(np.arange(100, 140, dtype=np.int32))
    rig.engine.prefix_cache.evict(3)  # of the older
    rig.publish()
    assert rig.known(b"x") == rig.known(b"y") == set(first[:2]) | set(second)
    assert [state.sequence for state in rig.sent[b"x"]] == [0, 1]
    rig.engine.prefix_cache.clear()
    rig.publish()
    assert not rig.known(b"x") and not rig.known(b"y")


def test_a_message_is_bounded_and_the_rest_follows(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(state_publisher, "MAX_DIGESTS", 4)
    rig = Rig()
    digests = rig.cache(np.arange(40, dtype=np.int32))
    rig.publisher.subscribe(b"x", Subscribe(True))
    while rig.publisher.due_s < math.inf:
        rig.clock.now = max(rig.clock.now, rig.publisher.due_s)
        rig.publish()
    assert [len(split_digests(state.added)) for state in rig.sent[b"x"]] == [4, 4, 2]
    assert rig.known() == set(digests) and rig.clock.now == 2 * PERIOD_S


def test_of_a_large_cache_each_nth_page_is_told(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(state_publisher, "MAX_TOLD_PAGES", 16)
    rig = Rig(num_pages=50)
    digests = rig.cache(np.arange(36, dtype=np.int32))
    rig.publisher.subscribe(b"x", Subscribe(True))
    rig.publish()
    assert rig.sent[b"x"][0].stride == 4 and rig.known() == {digests[3], digests[7]}
    longer = rig.cache(np.arange(72, dtype=np.int32))
    rig.publish()
    assert rig.known() == {longer[index] for index in (3, 7, 11, 15)}
    rig.engine.prefix_cache.evict(4)
    rig.publish()
    assert rig.known() == {longer[index] for index in (3, 7, 11)}


def test_each_subscriber_is_told_how_many_of_its_requests_the_load_includes() -> None:
    rig = Rig()
    for sender in (b"x", b"y"):
        rig.publisher.subscribe(sender, Subscribe(True))
    rig.publisher.received(b"x")
    rig.publish()
    rig.publisher.subscribe(b"x", Subscribe(True, num_sent=1))
    rig.publish()
    assert [state.num_received for state in rig.sent[b"x"]] == [1, 1], "a request counts whatever else is told anew"
    assert rig.sent[b"x"][1].sequence == 0 and rig.sent[b"y"][-1].num_received == 0


def test_who_was_forgotten_and_comes_back_has_no_request_missing() -> None:
    rig = Rig()
    rig.publisher.subscribe(b"x", Subscribe(True))
    rig.clock.now = LEASE_S + 1
    rig.publisher.check_leases()
    rig.publisher.received(b"x")
    rig.publisher.subscribe(b"x", Subscribe(False, num_sent=1))
    rig.publisher.received(b"x")
    rig.publish()
    assert [(state.sequence, state.num_received) for state in rig.sent[b"x"]] == [(0, 2)]


def test_who_does_not_renew_is_forgotten() -> None:
    rig = Rig()
    rig.publisher.subscribe(b"x", Subscribe(True))
    rig.clock.now = LEASE_S / 2
    rig.publisher.subscribe(b"y", Subscribe(True))
    rig.clock.now = LEASE_S + 1
    rig.publisher.check_leases()
    rig.publish()
    assert not rig.sent[b"x"] and len(rig.sent[b"y"]) == 1
    rig.clock.now = 2 * LEASE_S + 1
    rig.publisher.check_leases()
    assert rig.publisher.due_s == math.inf and rig.engine.prefix_cache._changes is None
