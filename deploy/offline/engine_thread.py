"""Runs a local engine's loop in a thread of its own, so that callers may be in any thread or event loop. The thread
builds, steps and ends the engine; other threads only send it commands, and take token deltas from it. Used by
`aerie.deploy.offline.engine`."""

import asyncio
import atexit
import contextlib
import functools
import logging
import os
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from aerie.cluster.coordinator.request_streams import token_delta
from aerie.cluster.transport.messages import TokenDelta
from aerie.speculative.build import EngineSpec, local_engine
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.scheduling.request import QueueFullError, Request, RequestOutput


class Receiver(Protocol):
    """Receives the deltas of its requests."""

    def put(self, deltas: list[TokenDelta]) -> None:
        """Receive a step's deltas. Called by the engine's thread; must return at once."""


class QueueReceiver:
    """Deltas for a thread, step by step."""

    def __init__(self) -> None:
        self.steps: queue.SimpleQueue[list[TokenDelta]] = queue.SimpleQueue()

    def put(self, deltas: list[TokenDelta]) -> None:
        self.steps.put(deltas)


class LoopReceiver:
    """Deltas for an event loop, by request."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.queues: dict[str, asyncio.Queue[TokenDelta]] = {}
        self._loop = weakref.ref(loop)

    def put(self, deltas: list[TokenDelta]) -> None:
        loop = self._loop()
        with contextlib.suppress(RuntimeError):  # closed; its generators have been closed before
            if loop is not None:
                loop.call_soon_threadsafe(self._put, deltas)

    def _put(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            if (queue := self.queues.get(delta.request_id)) is not None:
                queue.put_nowait(delta)


logger = logging.getLogger(__name__)

T = TypeVar("T")
Command = Callable[[LocalEngine | None], None]  # None: the engine has ended
EXIT_S = 30.0  # maximum wait for the thread's end, which takes a step and the end of the ranks


class EngineDeadError(RuntimeError):
    """The engine was closed or has failed; build another one."""


@dataclass(frozen=True)
class Job:
    """A request and the receiver of its tokens."""

    request: Request
    receiver: Receiver


class EngineThread:
    """An engine that runs in a thread of its own. All methods may be called from any thread.

    Every request gets exactly one delta with `finish`; it is the last. A request that can never run ends with
    "invalid", and all unfinished ones end with "error" if the engine fails or is closed.

    The engine also ends with the interpreter, and when this object is garbage. A fork of the process has no engine.
    """

    def __init__(self, spec: EngineSpec) -> None:
        """Start the thread, and wait until it has built the engine. Raises what building a rank raises."""
        loop = self._loop = _EngineLoop()
        self._receivers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopReceiver] = (
            weakref.WeakKeyDictionary()
        )
        thread = threading.Thread(target=loop.run, args=(spec,), name="aerie-engine", daemon=True)
        # The garbage collector may interrupt any code of any thread, so that it must not wait for this one.
        weakref.finalize(self, loop.commands.put, None).atexit = False
        thread.start()
        try:
            loop.ready.result()
        except KeyboardInterrupt:
            loop.commands.put(None)  # the thread ends once it has built the engine
            raise
        self._end = functools.partial(_end, loop, thread)
        atexit.register(self._end)

    def run(self, requests: Sequence[Request]) -> Generator[list[TokenDelta], None, None]:
        """Run requests. Yield each step's deltas until all have finished; closing the iterator, or Ctrl-C, aborts the
        others."""
        receiver = QueueReceiver()
        unfinished = {request.request_id for request in requests}
        try:
            self._submit([Job(request, receiver) for request in requests])
            while unfinished:
                deltas = receiver.steps.get()
                unfinished -= _finished(deltas)
                yield deltas
        finally:
            if unfinished:
                with contextlib.suppress(EngineDeadError):
                    self.abort(unfinished).result()

    async def stream(self, requests: Sequence[Request]) -> AsyncGenerator[list[TokenDelta], None]:
        """Do `run` in an event loop. Yields all deltas that have come meanwhile."""
        loop = asyncio.get_running_loop()
        receiver = self._receivers.setdefault(loop, LoopReceiver(loop))
        arrived: asyncio.Queue[TokenDelta] = asyncio.Queue()
        unfinished = {request.request_id for request in requests}
        receiver.queues.update(dict.fromkeys(unfinished, arrived))
        try:
            self._submit([Job(request, receiver) for request in requests])
            while unfinished:
                deltas = [await arrived.get()]
                while not arrived.empty():
                    deltas.append(arrived.get_nowait())
                unfinished -= _finished(deltas)
                yield deltas
        finally:
            for request in requests:
                del receiver.queues[request.request_id]
            if unfinished:
                with contextlib.suppress(EngineDeadError):
                    self.abort(unfinished)

    def abort(self, request_ids: Iterable[str]) -> "Future[None]":
        """End requests; they finish with "abort". Ids that are unknown, or have finished, are ignored."""
        ids, loop = list(request_ids), self._loop
        return self.call(lambda engine: loop.abort(engine, ids))

    def call(self, work: Callable[[LocalEngine], T]) -> "Future[T]":
        """Run `work` between two steps. Raises EngineDeadError if there is no engine."""
        result: Future[T] = Future()
        loop = self._loop

        def command(engine: LocalEngine | None) -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                if engine is None:
                    raise EngineDeadError(loop.fault)
                result.set_result(work(engine))
            except Exception as error:
                result.set_exception(error)

        loop.send(command)
        return result

    def load_adapter(self, name: str, path: str) -> "Future[str]":
        """Load a LoRA adapter beside steps, unless it is loaded. Return a future of its name, which raises
        ValueError if it does not fit."""
        result: Future[str] = Future()

        def loaded(error: str) -> None:
            if error:
                result.set_exception(ValueError(error))
            else:
                result.set_result(name)

        def begin(engine: LocalEngine) -> None:
            if any((adapter.name, adapter.path) == (name, path) for adapter in engine.scheduler.adapters.loaded):
                result.set_result(name)
            else:
                engine.scheduler.adapters.load(name, path, loaded, replace=True)

        def started(call: "Future[None]") -> None:
            if (error := call.exception()) is not None:
                result.set_exception(error)

        self.call(begin).add_done_callback(started)
        return result

    @property
    def fault(self) -> str:
        """Why requests cannot run, or ""."""
        return self._loop.fault

    def close(self) -> None:
        """End the engine and its ranks. Does nothing after the first call, and in a fork of the process."""
        self._end()
        atexit.unregister(self._end)

    def _submit(self, jobs: Sequence[Job]) -> None:
        waiting = self._loop.waiting
        self._loop.send(lambda engine: waiting.update((job.request.request_id, job) for job in jobs))


class _EngineLoop:
    """What the thread runs; it does not keep its `EngineThread` alive. Other threads use only `commands` (None ends the
    loop), `send`, `ready` and `fault`.

    waiting: requests that the scheduler does not have yet, in order.
    """

    def __init__(self) -> None:
        self.commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self.ready: Future[None] = Future()
        self.waiting: dict[str, Job] = {}
        self.fault = ""
        self.pid = os.getpid()
        self._running: dict[str, Job] = {}
        self._ending = threading.Lock()

    def send(self, command: Command) -> None:
        """Have the thread run `command` between two steps, or after the engine's end. Raises EngineDeadError."""
        if os.getpid() != self.pid:
            raise EngineDeadError(
                "this process is a fork of the one that built the engine: build the engine here, or start processes "
                'with multiprocessing.get_context("spawn")'
            )
        with self._ending:
            if self.fault:
                raise EngineDeadError(self.fault)
            self.commands.put(command)

    def run(self, spec: EngineSpec) -> None:
        """Build the engine and run it to its end."""
        fault = "the engine was closed"
        try:
            with local_engine(spec) as engine:
                self.ready.set_result(None)
                self._serve(engine)
        except BaseException as error:
            if not self.ready.done():
                self.ready.set_exception(error)
                return
            logger.critical("the engine's loop ended", exc_info=True)
            fault = f"the engine failed: {type(error).__name__}: {error}"
        with self._ending:
            self.fault = fault
        while not self.commands.empty():
            if (command := self.commands.get()) is not None:
                command(None)
        unfinished = self._running | self.waiting
        self._deliver((job, TokenDelta(name, (), "error", error=fault)) for name, job in unfinished.items())

    def abort(self, engine: LocalEngine, request_ids: Sequence[str]) -> None:
        """End requests in any state."""
        ended = []
        for name in request_ids:
            job = self.waiting.pop(name, None) or self._running.pop(name, None)
            if job is not None:
                engine.scheduler.abort(name)
                ended.append((job, TokenDelta(name, (), "abort")))
        self._deliver(ended)

    def _serve(self, engine: LocalEngine) -> None:
        """Step the engine while it has work, and run commands between steps, until the command None."""
        while True:
            has_commands = not engine.scheduler.commands.is_empty or engine.scheduler.adapters.is_loading
            is_idle = not (self.waiting or self._running or engine.executor.num_pending or has_commands)
            if is_idle or not self.commands.empty():
                command = self.commands.get()
                if command is None:
                    break
                command(engine)
                del command  # while the thread waits, it would keep alive what its caller drops
                continue
            self._start(engine)
            self._take(engine.step(), engine)
        engine.scheduler.fail_commands("the engine was closed")
        while engine.executor.num_pending:
            engine.executor.take()

    def _start(self, engine: LocalEngine) -> None:
        """Submit waiting requests while there are slots."""
        while self.waiting and len(self._running) < engine.scheduler.num_slots:
            name = next(iter(self.waiting))
            job = self.waiting.pop(name)
            try:
                engine.scheduler.submit(job.request)
                self._running[name] = job
            except (ValueError, QueueFullError) as error:
                self._deliver([(job, TokenDelta(name, (), "invalid", error=str(error)))])

    def _take(self, outputs: Sequence[RequestOutput], engine: LocalEngine) -> None:
        """Deliver a step's outputs."""
        deltas = []
        for output in outputs:
            name = output.request.request_id
            job = self._running.get(name)
            if job is not None:
                deltas.append((job, token_delta(output, True, False, engine.scheduler.num_draft_tokens)))
                if output.finish_reason is not None:
                    del self._running[name]
        self._deliver(deltas)

    def _deliver(self, deltas: Iterable[tuple[Job, TokenDelta]]) -> None:
        by_receiver: dict[Receiver, list[TokenDelta]] = {}
        for job, delta in deltas:
            by_receiver.setdefault(job.receiver, []).append(delta)
        for receiver, pieces in by_receiver.items():
            receiver.put(pieces)


def _finished(deltas: Iterable[TokenDelta]) -> set[str]:
    """Return the ids of requests that have ended."""
    return {delta.request_id for delta in deltas if delta.finish is not None}


def _end(loop: _EngineLoop, thread: threading.Thread) -> None:
    """End the thread and wait for it."""
    if os.getpid() != loop.pid:
        return
    loop.commands.put(None)
    if thread is not threading.current_thread():
        thread.join(EXIT_S)
