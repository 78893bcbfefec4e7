"""The machine's share of a gap, from samples of a server's processes and its client."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from tests.load.cpu_lent import CpuLent, OwnWait, Sample, lent_ms

CLIENT, RANK, OTHER, NEW = 1, 2, 3, 4
BEFORE = Sample(10.0, {RANK: 100.0}, {CLIENT: 0.0, RANK: 0.0}, {OTHER: 50.0}, 1000.0)


def lent(
    waited: float,
    foreign: dict[int, float],
    busy: float,
    needed: float = 0.0,
    end_s: float = 10.2,
) -> float:
    """Return the counters at the end of a gap of 200 ms that starts with `BEFORE`."""
    after = Sample(10.25, {RANK: waited}, {CLIENT: 0.0, RANK: needed}, foreign, busy)
    empty = Sample(9.98, {}, {}, {}, 0.0)
    return lent_ms([empty, BEFORE, after, replace(empty, at_s=10.3)], 10.0, end_s)


def test_what_the_longest_waiting_thread_waited_was_lent_to_other_programs() -> None:
    """Without what may have been before or after the gap: samples are 50 ms more than it apart."""
    assert lent(250.0, {OTHER: 250.0}, 1200.0) == pytest.approx(100)


def test_what_the_client_waited_was_lent_whoever_had_the_core() -> None:
    """Without a sample, since whatever kept the client from a core may have kept the sampler, too."""
    sampled = CpuLent(os.getpid(), os.getpid())
    own_ms = sampled.without_lent([[10.0, 11.4, 11.5], [10.0, 10.1]], [[5.0, 1345.0, 1345.0], [7.0, 7.0]])
    assert own_ms == [pytest.approx([60, 100]), pytest.approx([100])]


def test_what_the_servers_other_processes_took_was_not_lent() -> None:
    assert lent(250.0, {OTHER: 150.0}, 1200.0) == pytest.approx(50)  # half of it
    assert lent(250.0, {OTHER: 150.0}, 1200.0, needed=100.0) == pytest.approx(100)  # ranks may work
    assert lent(250.0, {OTHER: 50.0}, 1200.0) == 0.0


def test_an_unknown_process_is_the_servers() -> None:
    assert lent(250.0, {OTHER: 50.0, NEW: 200.0}, 1200.0) == 0.0


def test_nothing_is_known_of_times_without_samples() -> None:
    assert lent(300.0, {}, 1000.0, end_s=10.4) == 0.0 and lent_ms([], 1.0, 2.0) == 0.0


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone counts it")
def test_a_thread_that_is_kept_from_the_only_core_knows_how_long() -> None:
    """Beside a busy process on one core it waits about half of 0.3 s. Sleeping is not waiting."""
    allowed = os.sched_getaffinity(0)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            os.sched_setaffinity(0, {min(allowed)})
            os.sched_setaffinity(busy.pid, {min(allowed)})
            own = OwnWait()
            before_ms, end_s = own.ms(), time.monotonic() + 0.3
            while time.monotonic() < end_s:
                pass
            waited_ms = own.ms() - before_ms
        finally:
            os.sched_setaffinity(0, allowed)
            busy.kill()
    assert 20 < waited_ms < 1000 * (time.monotonic() - end_s + 0.3)
    own = OwnWait()
    before_ms, start_s = own.ms(), time.monotonic()
    time.sleep(0.2)
    assert own.ms() - before_ms <= 1000 * (time.monotonic() - start_s) - 200
