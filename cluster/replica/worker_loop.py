"""A rank's loop: plans and commands in, results, answers and heartbeats out. Called by the worker actor, and by tests,
without Ray."""

import time
import traceback
from collections.abc import Callable
from typing import Literal

import zmq

from aerie.cluster.linux import keep_freed_memory, lower_priority, trim_heap, use_exact_timers, use_short_time_slice
from aerie.cluster.transport.channel import RankChannel
from aerie.cluster.transport.messages import Heartbeat, Stop
from aerie.cluster.transport.sockets import Transport
from aerie.workers.runner.executor import StepExecutor
from aerie.workers.scheduling.commands.command import Command

HEARTBEAT_S = 0.5  # seconds between two heartbeats, and time without a step before idle work
IDLE_WORK_INTERVAL_S = 30.0  # minimum time between two calls of idle_work
_MAX_PENDING = 2  # `StepExecutor`'s contract: launched, result not taken
# Sleep between polls of a running GPU step; a result waits for half of it on average. On a busy AMD EPYC this sleep
# took 36 us with `use_exact_timers`, and 89 us with Linux's default slack (a sleep of 50 us took 125).
_DEVICE_POLL_S = 20e-6


def open_channel(transport: Transport, name: str, rank: int, epoch: int) -> RankChannel:
    """Return a rank's end of the channel to the coordinator of engine `name`."""
    return RankChannel(zmq.Context(), transport, rank, epoch, f"{name}-{epoch}-{rank}")


def use_cpu_settings() -> None:
    """Prepare this process for a rank on a CPU: give priority to processes that answer requests, and keep freed memory
    for the next step."""
    lower_priority()
    keep_freed_memory()


def idle_work_of(uses_gpus: bool) -> Callable[[], None] | None:
    """Return the work of an idle rank. On a CPU, steps fragment the heap: after some minutes, half of the memory would
    be unused."""
    return None if uses_gpus else trim_heap


def run_worker_loop(
    executor: StepExecutor,
    channel: RankChannel,
    clock: Callable[[], float] = time.monotonic,
    idle_work: Callable[[], None] | None = None,
) -> Literal["stopped", "coordinator lost"]:
    """Execute plans and commands in order until a `Stop` comes or the coordinator's connection closes; return which.

    Rank 0 sends results; all ranks send answers and heartbeats. An error of the executor is sent with its traceback,
    and raised.
    idle_work: called after steps, once none has run for `HEARTBEAT_S`, at most every `IDLE_WORK_INTERVAL_S`.
    """
    use_exact_timers()
    use_short_time_slice()
    loop = _Loop(executor, channel, clock, idle_work)
    try:
        while True:
            ended = loop.run_once()
            if ended is not None:
                return ended
    except Exception:
        channel.fail(traceback.format_exc())
        raise


def _end(channel: RankChannel) -> Literal["stopped", "coordinator lost"]:
    """Return why the connection closed: a coordinator that stops sends a `Stop` first."""
    while (message := channel.receive()) is not None:
        if isinstance(message, Stop):
            return "stopped"
    return "coordinator lost"


class _Loop:
    """The state of one worker's loop: which step it has reached, and when heartbeat and idle work are due."""

    def __init__(
        self,
        executor: StepExecutor,
        channel: RankChannel,
        clock: Callable[[], float],
        idle_work: Callable[[], None] | None,
    ) -> None:
        self._executor = executor
        self._channel = channel
        self._clock = clock
        self._num_steps = 0
        self._step_s = 0.0
        self._heartbeat_due_s = clock()
        self._idle_work = idle_work
        self._idle_work_due_s = clock()
        self._steps_before_idle_work = 0
        self._last_step_s = clock()

    def run_once(self) -> Literal["stopped", "coordinator lost"] | None:
        """Wait for a message if no step is pending, launch plans, carry out commands, and take finished results."""
        executor, channel = self._executor, self._channel
        now = self._clock()
        if now >= self._heartbeat_due_s:
            if channel.lost() is not None:
                return _end(channel)
            graphs = executor.graphs
            channel.send(Heartbeat(channel.rank, channel.epoch, self._num_steps, self._step_s, graphs))
            self._heartbeat_due_s = now + HEARTBEAT_S
            if self._idle_work is not None and self._is_time_for_idle_work(now):
                self._idle_work()
                self._idle_work_due_s, self._steps_before_idle_work = now + IDLE_WORK_INTERVAL_S, self._num_steps
        if executor.num_pending == 0:
            changed = channel.wait(max(1, int((self._heartbeat_due_s - now) * 1000)))
            if changed and channel.lost() is not None:
                return _end(channel)
        launched = False
        if executor.num_pending < _MAX_PENDING:
            message = channel.receive()
            if isinstance(message, Stop):
                return "stopped"
            if isinstance(message, Command):
                return None if self._carry_out(message) else _end(channel)
            if message is not None:
                executor.submit(message)
                launched = True
        if executor.num_pending > 0 and executor.ready():
            if not self._take():
                return _end(channel)
        elif not launched and executor.num_pending > 0:
            time.sleep(_DEVICE_POLL_S)  # a plan that arrives meanwhile waits at most this long
        return None

    def _is_time_for_idle_work(self, now: float) -> bool:
        idle = self._executor.num_pending == 0 and now - self._last_step_s >= HEARTBEAT_S
        return idle and now >= self._idle_work_due_s and self._num_steps > self._steps_before_idle_work

    def _carry_out(self, command: Command) -> bool:
        """Carry out a command and send the answer. Return False if the coordinator is lost."""
        while self._executor.num_pending > 0:  # rank 0 has reported the last step; this rank may not have polled yet
            if not self._take():
                return False
        answers = self._executor.carry_out(command)
        return all(self._channel.send(answer) for answer in answers)

    def _take(self) -> bool:
        """Wait for the oldest step's result, which rank 0 sends. Return False if the coordinator is lost."""
        result = self._executor.take()
        self._num_steps += 1
        self._last_step_s = self._clock()
        self._step_s += result.elapsed_s
        return self._channel.rank != 0 or self._channel.send(result)
