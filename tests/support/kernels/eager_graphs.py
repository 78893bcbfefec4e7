"""CUDA graphs without a GPU: a replay runs the captured function again and copies results to the captured outputs."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from aerie.workers.runner.graphs.kernel_compilation import CompileAhead

T = TypeVar("T")


class EagerRecorder:
    """A `aerie.workers.runner.graphs.step_capture.Recorder`. A recording runs the function, where a graph's would not:
    what runs must bear it. bytes_each: memory that each recording takes."""

    def __init__(self, bytes_each: int = 0) -> None:
        self.num_recorded = self.num_dry_runs = self.num_run_apart = 0
        self.num_replays = 0
        self._bytes_each = bytes_each

    def record(self, function: Callable[[], T], was_run: bool = True) -> tuple[Callable[[], None], T]:
        self.num_recorded += 1
        kept = function()

        def replay() -> None:
            self.num_replays += 1
            _copy(kept, function())

        return replay, kept

    def dry_run(self, function: Callable[[], object], ahead: CompileAhead) -> None:
        self.num_dry_runs += 1

    def run_on_own_stream(self, function: Callable[[], object]) -> None:
        self.num_run_apart += 1
        function()

    def used_bytes(self) -> int:
        return self.num_recorded * self._bytes_each


class _Output:
    """What a recording that has not been replayed yet will have written. Has the fields of `written` afterwards."""

    written: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.written, name)


class LazyRecorder(EagerRecorder):
    """Runs a function at the first replay of its recording, as a graph would. For whole engines, which record hundreds
    of steps and replay some of them."""

    def record(self, function: Callable[[], Any], was_run: bool = True) -> tuple[Callable[[], None], Any]:
        self.num_recorded += 1
        output = _Output()

        def replay() -> None:
            self.num_replays += 1
            if output.written is None:
                output.written = function()
            else:
                _copy(output.written, function())

        return replay, output


def _copy(kept: Any, new: Any) -> None:
    """Every tensor of a dataclass into its former self."""
    if isinstance(kept, Tensor):
        kept.copy_(new)
    elif kept is not None:
        for field in dataclasses.fields(kept):
            _copy(getattr(kept, field.name), getattr(new, field.name))
