"""What of a gap was the machine's, from samples of a server's processes and its client."""

import os
import time

import pytest

from tests.load.cpu_lent import CpuLent, Sample, lent_ms

CLIENT, RANK, HELPER, NEW = 1, 2, 3, 4
BEFORE = Sample(10.0, {CLIENT: 5.0, RANK: 100.0}, {HELPER: 50.0})


def lent(waited: dict[int, float], used: dict[int, float], end_s: float = 10.2) -> float:
    """Of a gap of 200 ms that begins with `BEFORE`, at whose end so much has been waited and used."""
    return lent_ms([Sample(9.98, {}, {}), BEFORE, Sample(10.25, waited, used), Sample(10.3, {}, {})], 10.0, end_s)


def test_what_the_longest_waiting_thread_waited_was_lent_to_others() -> None:
    """Without what may have been before or after the gap: samples are 50 ms more than it apart."""
    assert lent({CLIENT: 15.0, RANK: 250.0}, {HELPER: 50.0}) == pytest.approx(100)
    assert lent({CLIENT: 205.0, RANK: 130.0}, {HELPER: 50.0}) == pytest.approx(150)


def test_what_the_servers_other_processes_took_was_not_lent() -> None:
    assert lent({CLIENT: 5.0, RANK: 250.0}, {HELPER: 90.0, NEW: 30.0}) == pytest.approx(30)
    assert lent({CLIENT: 5.0, RANK: 250.0}, {HELPER: 200.0}) == 0.0


def test_nothing_is_known_of_times_without_samples() -> None:
    assert lent({RANK: 300.0}, {}, end_s=10.4) == 0.0 and lent_ms([], 1.0, 2.0) == 0.0


def test_a_client_that_has_the_core_waits_for_none() -> None:
    with CpuLent(os.getpid()) as sampled:
        time.sleep(0.1)
        start_s = time.monotonic()
        time.sleep(0.2)  # asleep is not waiting for a core
        end_s = time.monotonic()
        time.sleep(0.1)
    assert sampled(start_s, end_s) < 200
