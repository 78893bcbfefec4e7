"""Advertised engine state: bounded messages, complete in the end, sent only while an ingress listens."""

import math
from typing import cast

import numpy as np

from aerie.attention.kv_cache.radix_node import prompt_digests, split_digests
from aerie.cluster.coordinator import state_publisher
from aerie.cluster.coordinator.state_publisher import PERIOD_S, StatePublisher
from aerie.cluster.transport.channel import IngressLink
from aerie.cluster.transport.messages import EngineState
from aerie.workers.scheduling.scheduler import Scheduler
from tests.support.simulation.routing import Engine, SimulatedEngine
from tests.support.simulation.scheduler import Clock

X, Y = IngressLink(b"x"), IngressLink(b"y")


class Rig:
    """gone: an ingress that is found to have gone when it is sent something."""

    def __init__(self, num_pages: int = 50) -> None:
        self.clock = Clock()
        self.engine = SimulatedEngine(Engine(page_size=4, num_pages=num_pages), self.clock)
        self.gone: IngressLink | None = None
        self.sent: dict[IngressLink, list[EngineState]] = {X: [], Y: []}
        self.publisher = StatePublisher("e", cast(Scheduler, self.engine), self.clock, self._send)

    def _send(self, ingress: IngressLink, state: EngineState) -> None:
        self.sent[ingress].append(state)
        if ingress is self.gone:
            self.publisher.forget(ingress)

    def cache(self, tokens: np.ndarray) -> list[bytes]:
        """All pages of `tokens` come into the cache; their digests."""
        pages = self.engine.allocator.allocate(len(tokens) // 4)
        self.engine.prefix_cache.insert(tokens, pages)
        self.engine.allocator.release(pages)
        return prompt_digests(np.append(tokens, np.int32(0)), 4, 0)

    def publish(self) -> None:
        self.publisher.publish("ready", "", False, 0.0)

    def known(self, ingress: IngressLink = X) -> set[bytes]:
        """Return what a subscriber knows who has heard everything."""
        known: set[bytes] = set()
        for state in self.sent[ingress]:
            known |= set(split_digests(state.added))
            known -= set(split_digests(state.removed))
        return known


def test_nobody_listens_and_nothing_is_due() -> None:
    rig = Rig()
    rig.publisher.publish_soon()
    rig.publisher.count_request(X)
    rig.publish()
    assert rig.publisher.due_s == math.inf and not rig.sent[X]


def test_who_comes_later_knows_the_same_in_the_end() -> None:
    rig = Rig()
    rig.publisher.subscribe(X)
    first = rig.cache(np.arange(20, dtype=np.int32))
    rig.publish()
    rig.publisher.subscribe(Y)
    second = rig.cache(np.arange(100, 140, dtype=np.int32))
    rig.engine.prefix_cache.evict(3)  # of the older
    rig.publish()
    assert rig.known(X) == rig.known(Y) == set(first[:2]) | set(second)
    rig.engine.prefix_cache.clear()
    rig.publish()
    assert not rig.known(X) and not rig.known(Y)


def test_a_message_is_bounded_and_the_rest_follows(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(state_publisher, "MAX_DIGESTS", 4)
    rig = Rig()
    digests = rig.cache(np.arange(40, dtype=np.int32))
    rig.publisher.subscribe(X)
    while rig.publisher.due_s < math.inf:
        rig.clock.now = max(rig.clock.now, rig.publisher.due_s)
        rig.publish()
    assert [len(split_digests(state.added)) for state in rig.sent[X]] == [4, 4, 2]
    assert rig.known() == set(digests) and rig.clock.now == 2 * PERIOD_S


def test_of_a_large_cache_each_nth_page_is_told(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(state_publisher, "MAX_ADVERTISED_PAGES", 16)
    rig = Rig(num_pages=50)
    digests = rig.cache(np.arange(36, dtype=np.int32))
    rig.publisher.subscribe(X)
    rig.publish()
    assert rig.sent[X][0].stride == 4 and rig.known() == {digests[3], digests[7]}
    longer = rig.cache(np.arange(72, dtype=np.int32))
    rig.publish()
    assert rig.known() == {longer[index] for index in (3, 7, 11, 15)}
    rig.engine.prefix_cache.evict(4)
    rig.publish()
    assert rig.known() == {longer[index] for index in (3, 7, 11)}


def test_each_subscriber_is_told_how_many_of_its_requests_the_load_includes() -> None:
    rig = Rig()
    for ingress in (X, Y):
        rig.publisher.subscribe(ingress)
    rig.publish()
    rig.publisher.count_request(X)
    rig.publish()
    assert [state.num_received for state in rig.sent[X]] == [0, 1]
    assert [state.num_received for state in rig.sent[Y]] == [0, 0]


def test_who_goes_is_forgotten_and_others_are_told_on() -> None:
    rig = Rig()
    for ingress in (X, Y):
        rig.publisher.subscribe(ingress)
    rig.gone = X
    for _ in range(2):
        rig.publish()
    assert (len(rig.sent[X]), len(rig.sent[Y])) == (1, 2)
    rig.publisher.publish_soon()
    rig.publisher.forget(Y)
    assert rig.publisher.due_s == math.inf and rig.engine.prefix_cache._changes is None
