"""Most of a busy machine's cores for a server under test and its clients, so that gaps are theirs."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

NICENESS = -10
STREAMS_NICENESS = -15  # of clients that measure


def outweigh(process: int | str, niceness: int) -> None:
    """Give the session of a process more of the cores than other sessions get. Does nothing where this may not be:
    without autogroups, which Linux has, or the rights of root."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{process}/autogroup").write_text(str(niceness))


@contextlib.contextmanager
def outweighing() -> Iterator[None]:
    """The same for this process's session, until the context ends: a client that gets no core sends half requests."""
    found = None
    with contextlib.suppress(OSError):
        found = re.search(r"nice (-?\d+)", Path("/proc/self/autogroup").read_text())
    outweigh("self", NICENESS)
    try:
        yield
    finally:
        if found is not None:
            outweigh("self", int(found[1]))
