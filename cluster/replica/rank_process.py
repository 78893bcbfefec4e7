"""Rank processes that `aerie serve` starts before Ray: they load and warm up while Ray and Serve start. The worker
actor of such a rank is its proxy. No Ray here.

One process imports torch and the compiler, and forks the ranks and the processes that compile kernels. A rank listens
on a socket in the server's folder, and the first actor for the same rank of the same engine attaches to it. Without a
matching rank the actor builds one itself. The rank ends when its actor's process ends, and the actor's calls fail when
the rank ends.
"""

import contextlib
import functools
import gc
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aerie.cluster.environment import pin_network_interface, set_visible_devices, visible_devices
from aerie.cluster.linux import end_with_parent, raise_open_files, set_name
from aerie.cluster.plan import RankPlan
from aerie.cluster.replica.worker_loop import idle_work_of, open_channel, run_worker_loop, use_cpu_settings
from aerie.cluster.start_log import RankLog, use_logs
from aerie.cluster.transport.sockets import Transport
from aerie.kernels.lazy_import import load
from aerie.workers.distributed.ports import free_port
from aerie.workers.engine_layout import EngineLayout
from aerie.workers.runner.executor import StepExecutor
from aerie.workers.runner.graphs.compile_jobs import CompileProcesses, import_compiler, processes_of
from aerie.workers.scheduling.cost_table import CostTable

if TYPE_CHECKING:
    from aerie.cluster.assembly import RankBuilder

RANK_BUILDER = "aerie.cluster.assembly:RankBuilder"  # loading it imports torch, and takes seconds

NAME = "aerie-rank-"  # and its number
LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"
ATTACH_LIMIT_S = 60.0  # for a rank to open its device, after which it reports whether it matches


class RankLostError(RuntimeError):
    """The rank's process has ended."""


@dataclass(frozen=True)
class RankFacts:
    """Process and device of a rank; see `RankLocation`."""

    pid: int
    device: str
    visible_devices: str | None


class AttachedRank:
    """An actor's connection to a rank that was started ahead. Calls wait for the answer, and raise the rank's exception
    or RankLostError."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def facts(self) -> RankFacts:
        """Return where the rank runs."""
        facts: RankFacts = self._call("facts")
        return facts

    def build(self) -> tuple[EngineLayout, CostTable | None]:
        """Wait until the rank is ready for plans."""
        built: tuple[EngineLayout, CostTable | None] = self._call("build")
        return built

    def listen(self, transport: Transport, name: str, epoch: int) -> str:
        """Bind the channel; return the endpoint."""
        endpoint: str = self._call("listen", transport, name, epoch)
        return endpoint

    def run(self) -> str:
        """Execute plans until a `Stop` comes or the coordinator is lost; return which."""
        ended: str = self._call("run")
        return ended

    def _call(self, *request: object) -> Any:
        """Call a method of the rank and wait for its result. Raises what the rank raised, RankLostError if it has
        ended."""
        try:
            self._connection.send(request)
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise RankLostError("the process that was started ahead has ended") from error
        if isinstance(answer, BaseException):
            raise answer
        return answer


def attach(folder: Path | None, plan: RankPlan, rank: int) -> AttachedRank | None:
    """Attach to a free rank that was started ahead for an equal engine and can use its device; None without one.
    folder: see `aerie.cluster.environment.prestart_folder`."""
    if folder is None:
        return None
    path = _socket_path(folder, rank)
    end = socket.socket(socket.AF_UNIX)
    try:
        end.connect(str(path))
        path.unlink()
        connection = Connection(end.detach())
        connection.send(("attach", plan))
        if connection.poll(ATTACH_LIMIT_S):
            if connection.recv() is True:
                return AttachedRank(connection)
            connection.recv()  # fails once the process has ended and its memory is free
        connection.close()
    except (EOFError, OSError):
        end.close()
    return None


def start_ranks(plan: RankPlan, folder: Path) -> None:
    """Fork all ranks of one engine, on this machine's first GPUs or on its CPUs.
    This process must have only one thread and must not have used a device."""
    load(RANK_BUILDER)
    if plan.uses_gpus:
        import_compiler()
    if (count := len(os.listdir("/proc/self/task"))) > 1:
        raise RuntimeError(f"this process has {count} threads and cannot be forked")
    gc.freeze()  # imports stay shared between the processes
    sys.stdout.flush()
    size = plan.worker.tensor_parallel
    rendezvous = f"tcp://{LOOPBACK}:{free_port(LOOPBACK)}"
    for rank in range(size):
        compilers = CompileProcesses.fork(processes_of(size)) if plan.uses_gpus else None
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(_socket_path(folder, rank)))
        listener.listen(1)
        if os.fork() == 0:
            _end_as_rank(functools.partial(_Rank, plan, rank, rendezvous, compilers), listener)
        listener.close()
        if compilers is not None:
            compilers.close()


def wait_for_ranks() -> None:
    """Wait until all ranks that `start_ranks` forked have ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


class _Rank:
    """A rank in its process: built in the main thread, which also runs it, while another thread answers its actor."""

    def __init__(self, plan: RankPlan, rank: int, rendezvous: str, compilers: CompileProcesses | None) -> None:
        self._plan = plan
        self._rank = rank
        self._rendezvous = rendezvous
        self._compilers = compilers
        self._log = RankLog(rank, time.time())
        self._opened = threading.Event()
        self._facts: RankFacts | None = None
        self._requests: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._connection: Connection

    def run(self, listener: socket.socket) -> None:
        """Run until the process ends."""
        set_name(f"{NAME}{self._rank}")
        raise_open_files()  # before threads start: with threads, enlarging the table takes up to 0.7 s
        if not self._plan.uses_gpus:
            use_cpu_settings()
        threading.Thread(target=self._attend, args=(listener,), name="actor", daemon=True).start()
        builder = self._open()
        built: object
        try:
            executor = self._build(builder)
            built = builder.layout(), executor.costs
        except Exception as error:  # the actor raises it at its next call
            built = _portable(error)
        while True:
            method, *arguments = self._requests.get()
            if method == "build":
                _answer(self._connection, built)
            elif method == "listen":
                transport, name, epoch = arguments
                channel = open_channel(transport, name, self._rank, epoch)
                _answer(self._connection, channel.endpoint)
            else:
                idle_work = idle_work_of(self._plan.uses_gpus)
                outcome = _outcome(functools.partial(run_worker_loop, executor, channel, idle_work=idle_work))
                _answer(self._connection, outcome)

    def _open(self) -> "RankBuilder":
        """Build the rank. Ends the process on an error: then the actor builds the rank in its own process."""
        use_logs(self._plan.log_format, f"rank {self._rank}")
        if self._plan.uses_gpus:
            set_visible_devices(_device_of(self._rank, visible_devices()))
        pin_network_interface(LOOPBACK_INTERFACE)
        try:
            builder: RankBuilder = load(RANK_BUILDER)(self._plan, self._rank, self._compilers)
            self._facts = RankFacts(os.getpid(), builder.device_name, visible_devices())
        finally:
            self._opened.set()
        self._log.done("device opened")
        return builder

    def _build(self, builder: "RankBuilder") -> StepExecutor:
        """Build the rank. On a CPU, wait for the actor's first call first."""
        if not self._plan.uses_gpus:
            # do not measure step times while Ray and Serve start on the same cores
            self._requests.put(self._requests.get())
        gc.freeze()
        executor = builder.build(self._rendezvous, self._log.phase, advance=self._log.advance)
        gc.freeze()
        self._log.done("built")
        return executor

    def _attend(self, listener: socket.socket) -> None:
        """Answer the actor's short calls, pass the others to the main thread, and end the process when the actor ends.
        Runs in a thread."""
        end, _ = listener.accept()
        listener.close()
        self._connection = connection = Connection(end.detach())
        with contextlib.suppress(EOFError, OSError):
            while True:
                request = connection.recv()
                if request[0] == "attach":
                    self._opened.wait()
                    is_it = self._facts is not None and request[1] == self._plan
                    connection.send(is_it)
                    if not is_it:
                        break
                elif request[0] == "facts":
                    connection.send(self._facts)
                else:
                    self._requests.put(request)
        os._exit(1)


def _end_as_rank(make: Callable[[], _Rank], listener: socket.socket) -> None:
    """Run a forked process; never returns."""
    try:
        end_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        make().run(listener)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _answer(actor: Connection, value: object) -> None:
    """Send an answer. If the actor has ended, do nothing: `_Rank._attend` ends the process."""
    with contextlib.suppress(ConnectionError):
        actor.send(value)


def _outcome(work: Callable[[], object]) -> object:
    try:
        return work()
    except Exception as error:
        traceback.print_exc()
        return _portable(error)


def _portable(error: Exception) -> Exception:
    """Return the error, or one with its text if it cannot be pickled."""
    import pickle

    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def _device_of(rank: int, visible: str | None) -> str:
    """Return CUDA's name of a rank's GPU. visible: GPUs of the server."""
    return str(rank) if visible is None else visible.split(",")[rank]


def _socket_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"
