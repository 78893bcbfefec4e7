"""Delays Ctrl-C to the end of a step, so that no step is left incomplete. Used by training and
`aerie.workers.runner.local_engine`."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], bool]]:
    """Delay SIGINT within the context; the yielded function returns whether one arrived. A second one raises
    KeyboardInterrupt at once. Does nothing outside of the main thread, or if SIGINT does not raise
    KeyboardInterrupt."""
    came = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    former = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or former is not signal.default_int_handler:
        yield lambda: False
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, former)
