"""`PiecewiseForward`: runs the forward pass of a tower a few blocks at a time, so that steps of other requests come
between. The pass runs in a thread that waits at blocks; operations and results are those of an uninterrupted pass."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from aerie.kernels.capability import Capability


class _AbandonedError(Exception):
    """Ends the thread of a pass that is not continued."""


class PiecewiseForward:
    """One pass at a time over `blocks`, which the pass calls in order."""

    def __init__(self, blocks: Iterable[nn.Module], device: torch.device) -> None:
        self._device = device
        self._pass: _Pass | None = None
        for block in blocks:
            block.register_forward_pre_hook(self._before_block)

    def start(self, compute: Callable[[], Tensor]) -> None:
        """Start a pass, up to its first block. A pass that has not ended is abandoned."""
        self.abandon()
        self._pass = _Pass(compute, self._device)
        self._pass.advance()

    def advance(self, num_blocks: int) -> Tensor | None:
        """Run `num_blocks` blocks; to the end if 0. Return the result; None if the pass has not ended. Raises what
        `compute` raises."""
        running, count = self._pass, 0
        assert running is not None, "started"
        while running.is_alive and (num_blocks == 0 or count < num_blocks):
            running.advance()
            count += 1
        if running.is_alive:
            return None
        self._pass = None
        return running.result()

    def abandon(self) -> None:
        if self._pass is not None:
            self._pass.abandon()
            self._pass = None

    def _before_block(self, block: nn.Module, inputs: Any) -> None:
        running = self._pass
        if running is not None and running.is_own_thread:
            running.pause()


class _Pass:
    """A thread that alternates with its caller."""

    def __init__(self, compute: Callable[[], Tensor], device: torch.device) -> None:
        self._compute = compute
        self._device = device
        self._may_run, self._has_paused = threading.Semaphore(0), threading.Semaphore(0)
        self._is_abandoned = False
        self._result: Tensor | None = None
        self._error: BaseException | None = None
        self._stream = torch.cuda.current_stream(device) if Capability.of(device).has_streams else None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.is_alive = True
        self._thread.start()

    @property
    def is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def advance(self) -> None:
        """Run to the next pause, or to the end."""
        self._may_run.release()
        self._has_paused.acquire()

    def pause(self) -> None:
        self._has_paused.release()
        self._may_run.acquire()
        if self._is_abandoned:
            raise _AbandonedError

    def abandon(self) -> None:
        self._is_abandoned = True
        self.advance()

    def result(self) -> Tensor:
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def _run(self) -> None:
        """Compute the pass in this thread. It waits in the tower's blocks until it may continue, and ends early if it
        is abandoned."""
        self._may_run.acquire()
        try:
            if self._is_abandoned:
                return
            with torch.inference_mode():
                if self._stream is None:
                    self._result = self._compute()
                else:
                    with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                        self._result = self._compute()
        except _AbandonedError:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self.is_alive = False
            self._has_paused.release()
