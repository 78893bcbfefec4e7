"""The process that forks those for grammars, by itself."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import MODELS
from workers.structured_output.mask_process.template_process import LOWEST_PRIORITY, Template, Work

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="niceness is a thread's on Linux alone")


@pytest.fixture
def template() -> Iterator[Template]:
    made = Template()
    yield made
    made.close()


def niceness(pid: int) -> dict[int, int]:
    """Of each thread."""
    texts = {int(path.name): (path / "stat").read_text() for path in Path(f"/proc/{pid}/task").iterdir()}
    return {thread: int(text.rpartition(")")[2].split()[16]) for thread, text in texts.items()}


def test_what_takes_seconds_gives_way_to_running_requests_and_what_is_forked_does_not(template: Template) -> None:
    """The imports, beside engines that compute on the same cores; steps wait for the masks of what is forked."""
    template.start()
    assert template._process is not None
    pid, deadline_s = template._process.pid, time.monotonic() + 30
    while LOWEST_PRIORITY not in (seen := niceness(pid)).values():
        assert time.monotonic() < deadline_s and template._process.poll() is None, "nothing gave way"
        time.sleep(0.005)
    assert seen[pid] == os.nice(0)
    ours, theirs = os.pipe(), os.pipe()
    forked = template.fork(Work("trial", str(MODELS / "target"), 0), [ours[0], theirs[1]])
    assert psutil.Process(forked._pid).nice() <= os.nice(0) + 10  # a trial's own
    forked.kill()
    for file in (*ours, *theirs):
        os.close(file)
