"""Settings of a process that keep Linux from stopping it."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aerie.cluster.linux import physical_cores
from tests.support import ROOT

LOOK = """
import resource
from aerie.cluster.linux import raise_open_files
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
limit = min(hard, {limit})
resource.setrlimit(resource.RLIMIT_NOFILE, (64, limit))
assert raise_open_files() == limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
with open("/proc/self/status") as status:
    places = next(int(line.split()[1]) for line in status if line.startswith("FDSize"))
assert places >= min(limit, 1 << 16), (places, limit)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("limit", [300, 4096, 1 << 20])
def test_the_table_of_open_files_has_room_for_all_from_the_start(limit: int) -> None:
    """Where it grows later, the process waits for an RCU grace period, with all its streams."""
    subprocess.run([sys.executable, "-c", LOOK.format(limit=limit)], cwd=ROOT, check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_state_of_a_process_does_not_depend_on_its_name() -> None:
    look = "import os\nfrom aerie.cluster.linux import process_state, set_name\nset_name(') Z 1 (é')\n"
    check = "state, parent, ticks = process_state('self')\nassert (state, parent) == ('R', os.getppid()) and ticks > 0"
    subprocess.run([sys.executable, "-c", look + check], cwd=ROOT, check=True)


STEPS = """
import resource
import sys
from aerie.cluster.linux import keep_freed_memory
if sys.argv[1:]:
    keep_freed_memory()
for step in range(20):
    if step == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(size) for size in (60_000, 3_000_000, 12_000_000, 20_000_000, 20_000_000)]
    blocks.clear()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(*arguments: str) -> int:
    """Page faults of ten steps, after ten others, that allocate the same memory."""
    command = [sys.executable, "-c", STEPS, *arguments]
    return int(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_memory_of_one_step_is_kept_for_the_next() -> None:
    assert page_faults("keep") < 20 < 1000 < page_faults(), "with glibc's defaults each step asks for it again"


WAKE = """
import os, statistics, time
from aerie.cluster.linux import use_exact_timers, use_short_time_slice
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
use_exact_timers()
for _ in range(2):
    if os.fork() == 0:
        end_s = time.monotonic() + 20
        while os.getppid() != 1 and time.monotonic() < end_s:
            pass
        os._exit(0)
use_short_time_slice()
late_ms = []
for _ in range(200):
    computed_s = time.thread_time() + 2e-3
    while time.thread_time() < computed_s:
        pass
    asleep_s = time.monotonic()
    time.sleep(5e-5)
    late_ms.append(1e3 * (time.monotonic() - asleep_s) - 0.05)
print(statistics.median(late_ms), flush=True)
os.killpg(0, 9)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or tuple(map(int, re.findall(r"\d+", platform.release())[:2])) < (6, 12),
    reason="time slices of threads came with Linux 6.12",
)
def test_a_thread_with_a_short_time_slice_runs_as_soon_as_it_wakes() -> None:
    """A rank computes, and sleeps a little until another one comes. Beside two processes that compute on the same core,
    it waited for a timer tick."""
    command = [sys.executable, "-c", WAKE]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, start_new_session=True, timeout=60)
    assert float(run.stdout) < 0.4, run.stderr


def test_hardware_threads_of_a_core_count_once_and_a_quota_limits_them(tmp_path: Path) -> None:
    usable = sorted(os.sched_getaffinity(0))
    for cpu in usable:
        folder = tmp_path / "devices" / "system" / "cpu" / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}\n")
    cores = len({cpu // 2 for cpu in usable})
    assert physical_cores(tmp_path) == cores
    (tmp_path / "fs" / "cgroup").mkdir(parents=True)
    limit = tmp_path / "fs" / "cgroup" / "cpu.max"
    for text, expected in (("max 100000", cores), ("50000 100000", 1), (f"{9 * cores}00000 100000", cores)):
        limit.write_text(text + "\n")
        assert physical_cores(tmp_path) == expected
    assert physical_cores(tmp_path / "none") == len(usable)
