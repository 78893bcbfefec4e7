"""Times at the borders that a request crosses, in every process of an unchanged server.

`tests.bench.tracing.first_token` starts `aerie serve` with a `sitecustomize` on the path (`write_hook`) that calls
`install` in every Python process of it. Functions of our own are wrapped as their modules are imported; each call
leaves records in a file that is mapped into memory, so that a stamp costs about 2 us and nothing is lost when a process
is killed. All times are CLOCK_MONOTONIC, which the processes of a machine share. This module imports neither torch nor
Ray, because all of them import it.

What a stamp is about: a traced request by its number (the client's X-Request-Id says it; the ingress, before the
request has a name), a request by its name, or a step by its number. `tests.bench.tracing.first_token` joins them.
"""

import contextvars
import functools
import importlib.machinery
import importlib.util
import inspect
import itertools
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

REQUEST_ID = "first-token-"  # of a traced request, its number after it
NOTHING = -1
MAX_RECORDS = 1 << 20  # of a process, 64 MB of a sparse file
_RECORD = struct.Struct("<qii48s")  # nanoseconds, point, number, name

Subject = tuple[str, int]  # a request's name or "", and a number: of the traced request or of the step
Subjects = Callable[[tuple[Any, ...], Any], Iterable[Subject]]

_TOKEN_BYTES = 4  # of a plan's packed numbers

_traced: contextvars.ContextVar[int] = contextvars.ContextVar("traced", default=NOTHING)
_begun: set[str] = set()  # requests whose first tokens were seen


@dataclass(frozen=True)
class Stamp:
    """One record. name: "" for stamps of traced requests and of steps."""

    point: str
    at_ns: int
    name: str
    number: int
    pid: int


@dataclass(frozen=True)
class Border:
    """A function to be wrapped.

    where: module:qualified name; the name under which it is called.
    subjects: what a call is about, from its arguments and its result (None at the entry).
    entered, left: points to be stamped, "" for none. Those of a call that ends in an exception are left out.
    early: subjects are asked for at the entry, and the entry is stamped then.
    """

    where: str
    subjects: Subjects
    entered: str = ""
    left: str = ""
    early: bool = False


def _of_traced(args: tuple[Any, ...], result: Any) -> Iterable[Subject]:
    number = _traced.get()
    return [("", number)] if number != NOTHING else []


def _begin(args: tuple[Any, ...], result: Any) -> Iterable[Subject]:
    """The edge's middleware gets a request: what runs in its context is about it."""
    headers = dict(args[1].get("headers", ()))
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    _traced.set(int(given.removeprefix(REQUEST_ID)) if given.startswith(REQUEST_ID) else NOTHING)
    return _of_traced(args, result)


def _reply(args: tuple[Any, ...], result: Any) -> Iterable[Subject]:
    """A traced request has got its name."""
    number = _traced.get()
    return [(args[0]._engine_id, number)] if number != NOTHING else []


def _of_request(args: tuple[Any, ...], result: Any) -> Iterable[Subject]:
    """Return the request of the message in the last argument."""
    return [(args[-1].request_id, NOTHING)]


def _of_prompts(args: tuple[Any, ...], plan: Any) -> Iterator[Subject]:
    """The requests whose prompts a new plan begins or ends."""
    if plan is not None and (plan.inits or plan.chunks):
        by_slot = args[0].queues.by_slot
        for init in plan.inits:
            yield f"+{by_slot[init.slot].request.request_id}", plan.step
        for chunk in plan.chunks:
            if chunk.next_token < 0:
                yield by_slot[chunk.slot].request.request_id, plan.step


def _of_plan(args: tuple[Any, ...], result: Any) -> Iterable[Subject]:
    return [("", args[1].step)]


def _of_result(args: tuple[Any, ...], result: Any) -> Iterable[Subject]:
    """A step's result or plan that is an argument or comes out; heartbeats have no step."""
    step = getattr(result, "step", getattr(args[-1], "step", NOTHING))
    return [("", step)] if step != NOTHING else []


def _of_ready(args: tuple[Any, ...], result: Any) -> Iterable[Subject]:
    return [("", args[0]._pending[0].plan.step)] if result else []


def _of_contents(args: tuple[Any, ...], plan: Any) -> Iterable[Subject]:
    """Return what a new plan holds: prompt tokens, rounds, and the milliseconds that it should take (0: not known)."""
    if plan is None:
        return []
    tokens = sum(len(chunk.tokens) // _TOKEN_BYTES for chunk in plan.chunks)
    expected_ms = args[0].expected.ms if args[0].expected else 0.0
    return [(f"{tokens}/{len(plan.slots) // _TOKEN_BYTES}/{expected_ms:.3f}", plan.step)]


def _of_first_deltas(args: tuple[Any, ...], result: Any) -> Iterable[Subject]:
    """With tokens, of requests that had none yet: under load there are thousands a second."""
    deltas = (delta for delta in getattr(args[-1], "deltas", ()) if delta.tokens or delta.finish)
    new = [delta.request_id for delta in deltas if delta.request_id not in _begun]
    _begun.update(new)
    return [(name, NOTHING) for name in new]


def _of_delta(args: tuple[Any, ...], result: Any) -> Iterable[Subject]:
    return _of_traced(args, result) if result is not None else []


BORDERS = (
    Border("aerie.cluster.http.middleware:EdgeMiddleware.__call__", _begin, entered="ingress_entered", early=True),
    Border("aerie.cluster.http.endpoint:_read", _of_traced, left="body_read"),
    Border("aerie.cluster.http.endpoint:parse_body", _of_traced, left="body_parsed"),
    Border("aerie.cluster.http.text.tokenizer:ChatTokenizer.render", _of_traced, left="prompt_rendered"),
    Border("aerie.cluster.http.text.tokenizer:ChatTokenizer.encode", _of_traced, left="tokenized"),
    Border("aerie.cluster.http.serving:GenerationResponse.__init__", _reply, left="request_made"),
    Border("aerie.cluster.ingress.engine_links:EngineLinks.choose", _of_traced, entered="choice_begun", left="chosen"),
    Border("aerie.cluster.transport.channel:Listener.send", _of_traced, entered="request_sent"),
    Border(
        "aerie.cluster.coordinator.request_streams:RequestStreams._submit",
        _of_request,
        entered="coordinator_entered",
        left="submitted",
    ),
    Border("aerie.workers.scheduling.scheduler:Scheduler.schedule", _of_prompts, entered="plan_begun", left="planned"),
    Border("aerie.workers.scheduling.scheduler:Scheduler.schedule", _of_contents, left="contents"),
    Border("aerie.cluster.coordinator.worker_links:WorkerLinks.send", _of_plan, entered="plan_sent"),
    Border("aerie.cluster.transport.channel:RankChannel.receive", _of_result, left="plan_received"),
    Border("aerie.workers.slots:SlotTable.enter", _of_plan, entered="plan_uploaded", left="slots_set"),
    Border("aerie.workers.runner.plan_batch:PlanBatches.build", _of_plan, left="batch_made"),
    Border("aerie.workers.runner.worker:Worker.submit", _of_plan, left="launched"),
    Border("aerie.workers.runner.worker:Worker.ready", _of_ready, left="step_done"),
    Border("aerie.workers.runner.worker:Worker.take", _of_result, left="result_made"),
    Border("aerie.cluster.transport.channel:RankChannel.send", _of_result, entered="result_sent"),
    Border(
        "aerie.workers.scheduling.scheduler:Scheduler.apply",
        _of_result,
        entered="result_received",
        left="result_applied",
    ),
    Border("aerie.cluster.transport.channel:Inbox.send", _of_first_deltas, entered="published"),
    Border("aerie.cluster.ingress.engine_links:EngineLink._deliver", _of_first_deltas, entered="tokens_received"),
    Border("aerie.cluster.ingress.attempts:RequestStream.take", _of_delta, left="tokens_taken"),
    Border("aerie.cluster.http.answer:Answer.push", _of_traced, left="text_made"),
    Border("aerie.cluster.http.serving:_body", _of_traced, left="event_made"),
)
POINTS = tuple(point for border in BORDERS for point in (border.entered, border.left) if point)


class Recorder:
    """A process's stamps."""

    def __init__(self, folder: Path) -> None:
        path = folder / f"{os.getpid()}-{time.monotonic_ns()}.stamps"
        with open(path, "w+b") as file:
            file.truncate(MAX_RECORDS * _RECORD.size)
            self._memory = mmap.mmap(file.fileno(), 0)
        self._next = itertools.count()

    def put(self, point: int, at_ns: int, subjects: Iterable[Subject]) -> None:
        for name, number in subjects:
            place = next(self._next)
            if place < MAX_RECORDS:
                _RECORD.pack_into(self._memory, place * _RECORD.size, at_ns, point + 1, number, name.encode())


def read(folder: Path) -> Iterator[Stamp]:
    """Everything that was stamped."""
    for path in sorted(folder.glob("*.stamps")):
        pid = int(path.name.partition("-")[0])
        for at_ns, point, number, name in _RECORD.iter_unpack(path.read_bytes()):
            if point == 0:
                break
            yield Stamp(POINTS[point - 1], at_ns, name.rstrip(b"\0").decode(), number, pid)


def wrapped(function: Callable[..., Any], border: Border, put: Callable[[int, int, Iterable[Subject]], None]) -> Any:
    """`function`, stamping."""
    entered, left = (POINTS.index(point) if point else NOTHING for point in (border.entered, border.left))
    clock, subjects, early = time.monotonic_ns, border.subjects, border.early

    def leave(begun_ns: int, args: tuple[Any, ...], result: Any) -> None:
        ended_ns = clock()
        about = list(subjects(args, result))
        if entered != NOTHING and not early:
            put(entered, begun_ns, about)
        if left != NOTHING:
            put(left, ended_ns, about)

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            begun_ns = clock()
            if early:
                put(entered, begun_ns, subjects(args, None))
            result = await function(*args, **kwargs)
            leave(begun_ns, args, result)
            return result

        return call_async

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        begun_ns = clock()
        result = function(*args, **kwargs)
        leave(begun_ns, args, result)
        return result

    return call


def patch(module: ModuleType, put: Callable[[int, int, Iterable[Subject]], None]) -> None:
    """Wrap the functions of `module` that are borders. Raises AttributeError for one that it does not have."""
    for border in BORDERS:
        name, _, path = border.where.partition(":")
        if name == module.__name__:
            *outer, last = path.split(".")
            owner = functools.reduce(getattr, outer, module)
            setattr(owner, last, wrapped(getattr(owner, last), border, put))


class _Patching(MetaPathFinder):
    """Finds the modules that have borders, and patches them once they have run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = {border.where.partition(":")[0] for border in BORDERS}
        self._recorder: Recorder | None = None

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            patch(module, self._put)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _put(self, point: int, at_ns: int, subjects: Iterable[Subject]) -> None:
        if self._recorder is None:  # not before: most of Ray's processes never stamp anything
            self._recorder = Recorder(self._folder)
        self._recorder.put(point, at_ns, subjects)


def install(folder: str) -> None:
    """Stamp from now on in this process."""
    sys.meta_path.insert(0, _Patching(Path(folder)))


def write_hook(folder: Path) -> Path:
    """A folder for PYTHONPATH: Python processes that have it stamp into `folder`."""
    hook = folder / "hook"
    hook.mkdir(parents=True)
    (hook / "sitecustomize.py").write_text(
        f"from tests.bench.tracing.stamps import install\n\ninstall({str(folder)!r})\n"
    )
    return hook
