"""When captures come while an engine serves, by a clock that the test turns."""

from workers.scheduling.capture_pacing import CapturePacing
from workers.scheduling.plan import GraphCount


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_idle_engine_captures_one_after_the_other() -> None:
    pacing = CapturePacing(5.0, Clock())
    assert not pacing.is_due(is_idle=True), "nothing is waiting"
    pacing.graphs = GraphCount(10, 2)
    assert pacing.is_due(is_idle=True) and not pacing.is_due(is_idle=False)
    pacing.in_flight = True
    assert pacing.is_due(is_idle=False), "nothing else may be planned"
    assert pacing.has_ended(GraphCount(11, 1)) and not pacing.in_flight
    assert pacing.is_due(is_idle=True) and not pacing.has_ended(GraphCount(11, 0))
    assert not pacing.is_due(is_idle=True)


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
