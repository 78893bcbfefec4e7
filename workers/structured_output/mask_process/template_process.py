"""A process that imports the grammar compiler, or the image processor, once, and forks a process for each task.

Grammars come from clients. Compiling one or filling its masks may take minutes or all memory, or crash, and a thread
cannot interrupt the compiler, which is C++ code. So it runs in processes that may be killed at any time; a fork starts
another one in milliseconds. The same holds for decoders of images. Used by
`aerie.workers.structured_output.host_link` (the masks of a rank's requests),
`aerie.cluster.http.requests.grammar_checker` (the trial of a grammar) and
`aerie.cluster.http.requests.image_reader`.
"""

import atexit
import contextlib
import ctypes
import functools
import importlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from aerie.workers.structured_output.mask_messages import VocabularyError

if TYPE_CHECKING:
    from aerie.workers.structured_output.compiler import Vocabulary

T = TypeVar("T")

MEMORY_BYTES = 4 << 30  # memory limit of a forked process; torch takes 0.4 GB, and 1.5 GB of addresses
START_TIMEOUT_S = 120.0  # importing torch on a busy machine
LOWEST_PRIORITY = 19  # niceness
IMAGE_MODULE = "aerie.workers.vision.processor"  # by name, because it sends its results as masks are sent
IMAGE_PRIORITY = 5  # a request waits for its image, but rounds have the first call on the cores
_PARENT_CHECK_S = 1.0
_PR_SET_PDEATHSIG = 1


Kind = Literal["masks", "trial", "images"]  # task of the processes that a template forks


class Work(msgspec.Struct, frozen=True, array_like=True):
    """The task of a forked process.

    folder: the model's folder.
    vocab_size: size of the model's logits; 0: the tokenizer's vocabulary.
    end_token_ids: the usual end tokens of grammars; the template prepares their vocabulary.
    """

    folder: str
    vocab_size: int
    end_token_ids: tuple[int, ...] = ()


class _Forked(msgspec.Struct, frozen=True, array_like=True):
    """The answer to `Work`. pid: the new process. fault: why the fork failed, or ""."""

    pid: int
    fault: str = ""


class TemplateError(RuntimeError):
    """A process for grammars could not be started. The message says why."""


class Template:
    """The parent's end of the template process. `fork` may be called from any thread.

    A template for trials, and its forks, run at the lowest priority: on two cores, two trials of niceness 10 doubled
    the time of a step of two ranks of niceness 10; two of niceness 19 added up to a third.
    """

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        atexit.register(self.close)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Start the process. Does not wait."""
        with self._lock:
            self._start()

    def fork(self, work: Work, files: list[int]) -> "ForkedProcess":
        """Fork a process for `work`. It inherits copies of `files` (descriptors), and ends when this process ends.
        Raises TemplateError or VocabularyError."""
        with self._lock:
            self._start()
            assert self._socket is not None
            try:
                socket.send_fds(self._socket, [msgspec.msgpack.encode(work)], files)
                raw = self._socket.recv(1 << 16)
            except OSError as error:
                self._end()
                raise TemplateError(f"the template process for grammars failed: {error}") from None
            if not raw:
                self._end()
                raise TemplateError("the template process for grammars has ended")
        forked = msgspec.msgpack.decode(raw, type=_Forked)
        if forked.fault:
            raise VocabularyError(forked.fault)
        return ForkedProcess(forked.pid)

    def close(self) -> None:
        """End the process and all its forks."""
        with self._lock:
            self._end()

    def _start(self) -> None:
        """Start the template's process and connect a socket to it, unless it runs."""
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(START_TIMEOUT_S)
        # the parent's sys.path, which may not be in the environment
        program = (
            "import os; os.environ.update(TOKENIZERS_PARALLELISM='false', OMP_NUM_THREADS='1'); "
            f"import sys; sys.path[:] = {sys.path!r}; "
            "from aerie.workers.structured_output.mask_process.template_process import main; "
            f"main({theirs.fileno()}, {os.getpid()}, {self._kind!r})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            # Ignore Ctrl-C; the parent ends this process. A new session would also keep Ctrl-C away. But where Linux
            # groups processes by session (autogroups), it would get as many cores as the rest of the server, regardless
            # of niceness: two trials made a step of two ranks on two cores take three times as long.
            process_group=0,
        )
        theirs.close()
        self._socket = ours

    def _end(self) -> None:
        """End the template process."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class ForkedProcess:
    """A process forked by the template, identified by a descriptor, because its pid may be reused after its end.
    Without descriptors (not on Linux), the process ends when its sockets are closed."""

    def __init__(self, pid: int) -> None:
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):
            self._descriptor = os.pidfd_open(pid)
        self._pid = pid

    def lower_priority(self) -> None:
        """Run only on otherwise idle cores (SCHED_IDLE), if Linux allows it. Eight processes of niceness 19 would take
        a third of two cores from two ranks of niceness 10."""
        with contextlib.suppress(OSError):
            if sys.platform == "linux":
                os.sched_setscheduler(self._pid, os.SCHED_IDLE, os.sched_param(0))

    def processor_s(self) -> float:
        """Return the CPU seconds used; infinity if unknown."""
        try:
            with open(f"/proc/{self._pid}/stat") as file:
                ticks = file.read().rpartition(")")[2].split()[11:13]
        except OSError:
            return float("inf")
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        """Kill the process unless it has ended."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)


@functools.cache
def template(kind: Kind) -> Template:
    """Return this process's only template for `kind`, because a template takes seconds to start, and 0.3 GB."""
    return Template(kind)


def main(descriptor: int, parent: int, kind: Kind) -> None:
    """Fork processes until the parent has ended."""
    if kind != "masks":
        os.nice(LOWEST_PRIORITY if kind == "trial" else IMAGE_PRIORITY)
    # Forks inherit the imports, and the vocabulary or the processor.
    if kind == "images":
        _image_module()  # a request may wait for it
    else:
        _at_low_priority(_import)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap ended children automatically
    own = socket.socket(fileno=descriptor)
    own.settimeout(_PARENT_CHECK_S)
    while os.getppid() == parent:
        try:
            raw, files, _, _ = socket.recv_fds(own, 1 << 16, 8)
        except TimeoutError:
            continue
        if not raw:
            return
        try:
            answer = _fork(kind, msgspec.msgpack.decode(raw, type=Work), files, own)
        except (OSError, ValueError) as error:
            answer = _Forked(0, str(error))
        for file in files:
            os.close(file)
        with contextlib.suppress(BrokenPipeError):  # the parent has just ended
            own.send(msgspec.msgpack.encode(answer))


def _import() -> None:
    with _without_transformers():
        import xgrammar  # noqa: F401
    import aerie.workers.structured_output.mask_process.mask_host
    import aerie.workers.structured_output.mask_process.trial  # noqa: F401


@contextlib.contextmanager
def _without_transformers() -> Iterator[None]:
    """Import xgrammar without transformers, which takes 1.7 s of CPU and 25 MB. xgrammar (0.2.8) needs it only for
    transformers' tokenizers, which are not used here."""
    if "transformers" in sys.modules:
        yield
        return
    stand_in = ModuleType("transformers")
    for name in ("LogitsProcessor", "PreTrainedTokenizerBase", "PreTrainedTokenizerFast"):
        setattr(stand_in, name, type(name, (), {}))
    sys.modules["transformers"] = stand_in
    try:
        yield
    finally:
        del sys.modules["transformers"]


def _at_low_priority(call: Callable[[], T]) -> T:
    """Return the result of `call`, run at low priority, because requests run on the same cores.

    It runs in a thread: on Linux niceness belongs to a thread and cannot be lowered again, and steps wait for the main
    thread's forks. On other systems niceness belongs to the process and stays unchanged.
    """
    first = functools.partial(os.nice, LOWEST_PRIORITY) if sys.platform == "linux" else None
    with ThreadPoolExecutor(1, "low priority", first) as thread:
        return thread.submit(call).result()


def _fork(kind: Kind, work: Work, files: list[int], own: socket.socket) -> _Forked:
    """Fork one process. Raises VocabularyError (a ValueError) and OSError."""
    prepared: Any = (
        _processor(work.folder) if kind == "images" else _prepared(work.folder, work.vocab_size, work.end_token_ids)
    )
    own_pid = os.getpid()
    pid = os.fork()
    if pid:
        return _Forked(pid)
    try:
        own.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == own_pid:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
            _run(kind, files, prepared)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _run(kind: Kind, files: list[int], prepared: Any) -> None:
    """Run the task. prepared: the vocabulary, or the image processor."""
    if kind == "images":
        _image_module().run_image(files, prepared)
    elif kind == "masks":
        from aerie.workers.structured_output.mask_process.mask_host import run_host

        run_host(files, prepared)
    else:
        from aerie.workers.structured_output.mask_process.trial import run_trial

        run_trial(files, prepared)


def _image_module() -> Any:
    return importlib.import_module(IMAGE_MODULE)


@functools.cache
def _processor(folder: str) -> Any:
    return _image_module().load_processor(folder)


@functools.cache
def _prepared(folder: str, vocab_size: int, end_token_ids: tuple[int, ...]) -> "Vocabulary":
    """Read the vocabulary at low priority, because a server may be starting on the same cores."""

    def prepare() -> "Vocabulary":
        vocabulary = _vocabulary(folder, vocab_size)
        if end_token_ids:
            vocabulary.tokens(end_token_ids, False)
        return vocabulary

    return _at_low_priority(prepare)


@functools.cache
def _vocabulary(folder: str, vocab_size: int) -> "Vocabulary":
    from aerie.workers.structured_output.compiler import Vocabulary

    return Vocabulary(folder, vocab_size)
