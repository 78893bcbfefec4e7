"""What of a gap was the machine's, from samples of a server's processes and its client."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from tests.load.cpu_lent import CpuLent, Sample, lent_ms

CLIENT, RANK, OTHER, NEW = 1, 2, 3, 4
BEFORE = Sample(10.0, 5.0, {RANK: 100.0}, {CLIENT: 0.0, RANK: 0.0}, {OTHER: 50.0}, 1000.0)


def lent(
    waited: float,
    foreign: dict[int, float],
    busy: float,
    needed: float = 0.0,
    client: float = 5.0,
    end_s: float = 10.2,
) -> float:
    """Of a gap of 200 ms that begins with `BEFORE`, at whose end so much has been waited and used."""
    after = Sample(10.25, client, {RANK: waited}, {CLIENT: 0.0, RANK: needed}, foreign, busy)
    empty = Sample(9.98, 0.0, {}, {}, {}, 0.0)
    return lent_ms([empty, BEFORE, after, replace(empty, at_s=10.3)], 10.0, end_s)


def test_what_the_longest_waiting_thread_waited_was_lent_to_other_programs() -> None:
    """Without what may have been before or after the gap: samples are 50 ms more than it apart."""
    assert lent(250.0, {OTHER: 250.0}, 1200.0) == pytest.approx(100)
    assert lent(250.0, {OTHER: 250.0}, 1200.0, client=205.0) == pytest.approx(150)


def test_what_the_client_waited_was_lent_whoever_had_the_core() -> None:
    assert lent(100.0, {OTHER: 50.0}, 1200.0, client=205.0) == pytest.approx(150)


def test_what_the_servers_other_processes_took_was_not_lent() -> None:
    assert lent(250.0, {OTHER: 150.0}, 1200.0) == pytest.approx(50)  # half of it
    assert lent(250.0, {OTHER: 150.0}, 1200.0, needed=100.0) == pytest.approx(100)  # ranks may work
    assert lent(250.0, {OTHER: 50.0}, 1200.0) == 0.0


def test_an_unknown_process_is_the_servers() -> None:
    assert lent(250.0, {OTHER: 50.0, NEW: 200.0}, 1200.0) == 0.0


def test_nothing_is_known_of_times_without_samples() -> None:
    assert lent(300.0, {}, 1000.0, end_s=10.4) == 0.0 and lent_ms([], 1.0, 2.0) == 0.0


def test_a_client_that_has_the_core_waits_for_none() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as client:
        with CpuLent(os.getpid(), client.pid) as sampled:
            time.sleep(0.1)
            start_s = time.monotonic()
            time.sleep(0.2)  # asleep is not waiting for a core
            end_s = time.monotonic()
            time.sleep(0.1)
        client.kill()
    assert sampled(start_s, end_s) < 200
