"""Waiting to a fraction of a millisecond, and no longer than until something comes."""

import time

from aerie.cluster.transport.reactor import Reactor


def test_a_turn_waits_for_fractions_of_a_millisecond():
    """The shortest of several: a busy machine may make any of them longer."""
    reactor = Reactor()
    for timeout_s in (0.0004, 0.0017):
        took = []
        for _ in range(30):
            begin = time.monotonic()
            reactor.run_once(timeout_s)
            took.append(time.monotonic() - begin)
        assert timeout_s <= min(took) < timeout_s + 0.0005
    reactor.close()


def test_a_call_ends_the_wait():
    reactor = Reactor()
    future = reactor.call(lambda: 7)
    begin = time.monotonic()
    reactor.run_once(30.0)
    assert future.result(0) == 7 and time.monotonic() - begin < 10.0
    reactor.close()
