"""The process that forks those for grammars, by itself."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from aerie.workers.structured_output.mask_process import template_process
from aerie.workers.structured_output.mask_process.template_process import LOWEST_PRIORITY, Kind, Template, Work
from tests.support import MODELS, ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="niceness is a thread's on Linux alone")


@contextlib.contextmanager
def started(kind: Kind) -> Iterator[tuple[Template, int]]:
    """A template, and its process."""
    made = Template(kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_process, "START_TIMEOUT_S", 280.0)  # a busy machine may take minutes
        made.start()
    assert made._process is not None
    try:
        yield made, made._process.pid
    finally:
        made.close()


def niceness(pid: int) -> dict[int, int]:
    """Return the niceness of each thread."""
    texts = {int(path.name): (path / "stat").read_text() for path in Path(f"/proc/{pid}/task").iterdir()}
    return {thread: int(text.rpartition(")")[2].split()[16]) for thread, text in texts.items()}


def test_imports_give_way_to_running_requests_and_the_process_that_fills_masks_does_not() -> None:
    """Engines compute on the same cores meanwhile, and their steps wait for masks."""
    with started("masks") as (template, pid):
        deadline_s = time.monotonic() + 120  # Python starts late on a busy machine
        while LOWEST_PRIORITY not in (seen := niceness(pid)).values():
            assert time.monotonic() < deadline_s, "nothing gave way"
            time.sleep(0.005)
        assert seen[pid] == os.nice(0)
        with fork(template) as forked:
            assert set(niceness(forked).values()) == {os.nice(0)}


def test_trials_are_behind_ranks_in_the_scheduling_group_of_ranks() -> None:
    """Linux with autogroups divides cores between sessions, and heeds niceness within one alone. A process group of its
    own keeps Ctrl-C away."""
    with started("trial") as (template, pid), fork(template) as forked:
        assert set(niceness(pid).values()) == set(niceness(forked).values()) == {LOWEST_PRIORITY}
        assert os.getsid(pid) == os.getsid(forked) == os.getsid(0)
        assert os.getpgid(pid) == os.getpgid(forked) == pid


def test_a_template_imports_no_transformers_and_leaves_it_to_be_imported() -> None:
    """It would take longer than the compiler itself, in two processes of each server."""
    program = (
        "import sys; from aerie.workers.structured_output.mask_process import template_process; "
        "template_process._import(); "
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'transformers', 'xgrammar'})); "
        "import transformers; print(transformers.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[:2] == ["['xgrammar']", version("transformers")], done.stdout + done.stderr


@contextlib.contextmanager
def fork(template: Template) -> Iterator[int]:
    """A process that waits for its first message."""
    sockets = [socket.socketpair() for _ in range(2)]
    forked = template.fork(Work(str(MODELS / "target"), 0), [theirs.fileno() for _, theirs in sockets])
    try:
        yield forked._pid
    finally:
        forked.kill()
        for pair in sockets:
            for each in pair:
                each.close()
