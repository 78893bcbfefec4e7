"""Settings of a process that keep Linux from stopping it."""

import subprocess
import sys

import pytest

from tests.support import ROOT

LOOK = """
import resource
from cluster.linux import raise_open_files
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
    look = "import os\nfrom cluster.linux import process_state, set_name\nset_name(') Z 1 (é')\n"
    check = "state, parent, ticks = process_state('self')\nassert (state, parent) == ('R', os.getppid()) and ticks > 0"
    subprocess.run([sys.executable, "-c", look + check], cwd=ROOT, check=True)
