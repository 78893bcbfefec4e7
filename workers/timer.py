"""`Timer`: milliseconds of work on a device."""

import time
from collections.abc import Callable

import torch

from aerie.kernels.capability import Capability


class Timer:
    """Measures milliseconds between pairs of marks. On a GPU, marks are events on the stream. Only `read` waits for
    them, so that the host runs ahead as in serving."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._has_events = Capability.of(device).has_streams
        self._clock = clock
        self._events: list[torch.cuda.Event] = []
        self._stamps: list[float] = []

    def mark(self) -> None:
        """Start a span, or end the current one."""
        if not self._has_events:
            self._stamps.append(self._clock() * 1e3)
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)

    def read(self) -> list[float]:
        """Return the milliseconds of each span since the last call. Waits for the device."""
        if self._has_events:
            self._events[-1].synchronize()
            pairs = zip(self._events[::2], self._events[1::2], strict=True)
            spans = [begin.elapsed_time(end) for begin, end in pairs]
        else:
            spans = [end - begin for begin, end in zip(self._stamps[::2], self._stamps[1::2], strict=True)]
        self._events, self._stamps = [], []
        return spans
