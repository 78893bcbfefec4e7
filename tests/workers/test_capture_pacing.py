"""When captures come while an engine serves, by a clock that the test turns."""

from workers.scheduling.capture_pacing import IDLE_S, CapturePacing
from workers.scheduling.plan import GraphCount


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_idle_engine_captures_one_after_the_other() -> None:
    clock = Clock()
    pacing = CapturePacing(5.0, clock)
    assert not pacing.is_due(is_idle=True), "nothing is waiting"
    pacing.graphs = GraphCount(10, 2)
    assert pacing.is_due(is_idle=True)
    pacing.in_flight = True
    assert pacing.is_due(is_idle=False), "nothing else may be planned"
    assert pacing.has_ended(GraphCount(11, 1)) and not pacing.in_flight
    clock.now += IDLE_S
    assert pacing.is_due(is_idle=True) and not pacing.has_ended(GraphCount(11, 0))
    assert not pacing.is_due(is_idle=True)


def test_who_comes_back_soon_meets_no_capture() -> None:
    clock = Clock()
    pacing = CapturePacing(60.0, clock)
    pacing.graphs = GraphCount(10, 2)
    for _ in range(20):  # requests of 50 ms, 0.4 s apart
        assert not pacing.is_due(is_idle=False)
        clock.now += 0.05
        assert not pacing.is_due(is_idle=False)
        for _ in range(4):
            clock.now += 0.1
            assert not pacing.is_due(is_idle=True)
    clock.now += IDLE_S
    assert pacing.is_due(is_idle=True)


def test_under_load_one_capture_comes_in_every_interval() -> None:
    """It is neither sooner, nor does it wait for an idle moment that never comes."""
    clock = Clock()
    pacing = CapturePacing(5.0, clock)
    pacing.graphs = GraphCount(10, 100)
    times = []
    for _ in range(4000):
        clock.now += 0.01
        if pacing.is_due(is_idle=False):
            times.append(clock.now)
            pacing.in_flight = True
            clock.now += 0.1
            pacing.has_ended(GraphCount(10, 100))
    gaps = [later - sooner for sooner, later in zip(times, times[1:], strict=False)]
    assert len(times) == 7 and all(5.1 <= gap < 5.12 for gap in gaps)
