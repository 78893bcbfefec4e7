"""A coordinator with real sockets and ranks in threads, for tests without Ray."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from aerie.attention.config import CacheConfig
from aerie.cluster.coordinator.coordinator import Coordinator
from aerie.cluster.coordinator.loop import CoordinatorSettings
from aerie.cluster.replica.worker_loop import run_worker_loop
from aerie.cluster.transport.channel import RankChannel, connect_engine
from aerie.cluster.transport.encoding import Message, decode_numbered, encode
from aerie.cluster.transport.messages import EngineState, GenerateRequest, Refusal, Refused, TokenBatch, TokenDelta
from aerie.cluster.transport.sockets import Transport
from aerie.workers.config import PLAIN, RoundShape, RoundShapes, SchedulerConfig
from aerie.workers.scheduling.cost_table import CostTable
from aerie.workers.scheduling.plan import SamplingParams, StepPlan, pack_i32
from aerie.workers.scheduling.request import Owner
from aerie.workers.scheduling.scheduler import Scheduler
from tests.support.scripted import ScriptedExecutor

TREE = RoundShape(name="tree", width=6, max_new_tokens=4, draft_tokens=2)
TIMEOUT_S = 10.0


def until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Waits for another thread to make `condition` true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


class Ingress:
    """A connection to a coordinator: sends requests, reads what becomes of them, and checks that no message is lost."""

    def __init__(self, context: zmq.Context, transport: Transport, inbox: str) -> None:
        self.socket, self.monitor = connect_engine(context, transport, inbox)
        self.deltas: dict[str, list[TokenDelta]] = {}
        self.refusals: dict[str, Refusal] = {}
        self.states: list[EngineState] = []
        self.num_messages = 0
        self.num_batches = 0

    def send(self, message: Message) -> None:
        self.socket.send(encode(message))

    def read(self, timeout_s: float = TIMEOUT_S) -> bool:
        """One message; False if none comes."""
        if not self.socket.poll(int(timeout_s * 1000)):
            return False
        message = decode_numbered(self.socket.recv(), self.num_messages)
        self.num_messages += 1
        if isinstance(message, TokenBatch):
            self.num_batches += 1
            for delta in message.deltas:
                self.deltas.setdefault(delta.request_id, []).append(delta)
        elif isinstance(message, Refused):
            self.refusals[message.request_id] = message.refusal
        else:
            assert isinstance(message, EngineState)
            self.states.append(message)
        return True

    def read_refusal(self, request_id: str) -> Refusal:
        while request_id not in self.refusals:
            assert self.read(), f"{request_id} was not refused"
        return self.refusals[request_id]

    def read_end(self, request_id: str) -> TokenDelta:
        """The request's last delta."""
        while not (seen := self.deltas.get(request_id)) or seen[-1].finish is None:
            assert self.read(), f"{request_id} did not end"
        return seen[-1]

    def tokens(self, request_id: str) -> list[int]:
        return [token for delta in self.deltas.get(request_id, []) for token in delta.tokens]

    def close(self) -> None:
        self.monitor.close()
        self.socket.close()


class Ranks:
    """One worker group: a thread per rank. executors may be replaced before `start`."""

    def __init__(self, bed: "TestBed", epoch: int, num_ranks: int = 2) -> None:
        self.executors = [ScriptedExecutor(bed.shapes, 8, 200, delay_s=bed.delay_s) for _ in range(num_ranks)]
        self.channels = [
            RankChannel(bed.context, bed.transport, rank, epoch, f"r{rank}-{epoch}") for rank in range(num_ranks)
        ]
        self.endpoints = [channel.endpoint for channel in self.channels]
        self.ends: list[object] = [None] * num_ranks
        self.threads = [threading.Thread(target=self._run, args=(rank,), daemon=True) for rank in range(num_ranks)]

    def start(self) -> "Ranks":
        for thread in self.threads:
            thread.start()
        return self

    def _run(self, rank: int) -> None:
        try:
            self.ends[rank] = run_worker_loop(self.executors[rank], self.channels[rank])
        except (Exception, SystemExit) as error:
            self.ends[rank] = error
        self.channels[rank].close()

    def kill(self, rank: int) -> None:
        """With its next plan, what the end of a rank's process does to its socket."""

        def leave(plan: StepPlan) -> None:
            raise SystemExit

        self.executors[rank].submit = leave  # type: ignore[method-assign]

    def join(self) -> None:
        for thread in self.threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "a rank's loop did not end"


class TestBed:
    """Coordinator, engine replica's socket and one ingress."""

    __test__ = False

    def __init__(
        self,
        folder: Path,
        transport: Transport | None = None,
        delay_s: float = 0.0,
        max_running: int = 4,
        max_waiting: int | None = 20,
        **settings: object,
    ) -> None:
        self.shapes = RoundShapes((PLAIN, TREE), default=1)
        self.delay_s = delay_s
        self.transport = transport or Transport(folder=str(folder))
        self.context = zmq.Context()
        self.scheduler = Scheduler(
            SchedulerConfig(max_running=max_running, max_step_tokens=32, max_waiting=max_waiting),
            CacheConfig(page_size=4),
            200,
            400,
            time.monotonic,
            self.shapes,
            1,
        )
        self.lost: list[str] = []
        self.deaths: list[str] = []
        self.coordinator = Coordinator(
            self.scheduler,
            CoordinatorSettings("e1", self.transport, **settings),  # type: ignore[arg-type]
            self.lost.append,
            self.deaths.append,
        )
        self.coordinator.start()
        self.ingress = self.new_ingress()
        self.ranks: list[Ranks] = []

    def new_ingress(self) -> Ingress:
        return Ingress(self.context, self.transport, self.coordinator.endpoint)

    def new_ranks(self, epoch: int = 1, num_ranks: int = 2) -> Ranks:
        ranks = Ranks(self, epoch, num_ranks)
        self.ranks.append(ranks)
        return ranks

    def attach(self, epoch: int = 1, num_ranks: int = 2, costs: CostTable | None = None) -> Ranks:
        ranks = self.new_ranks(epoch, num_ranks).start()
        self.coordinator.attach(ranks.endpoints, epoch, costs)
        return ranks

    def generate(  # type: ignore[no-untyped-def]
        self,
        request_id: str,
        prompt_len: int = 5,
        max_tokens: int = 20,
        ingress: Ingress | None = None,
        running_stats: bool = False,
        token_origins: bool = False,
        num_crashes: int = 0,
        owner: Owner = Owner(),  # noqa: B008 - immutable
        **sampling,
    ):
        params = SamplingParams(max_tokens=max_tokens, **sampling)
        (ingress or self.ingress).send(
            GenerateRequest(
                request_id,
                pack_i32(list(range(prompt_len))),
                params,
                running_stats=running_stats,
                token_origins=token_origins,
                num_crashes=num_crashes,
                owner=owner,
            )
        )
        return params

    def oldest_plan_age_s(self) -> float:
        """The age of the oldest plan without a result; 0 without one."""
        group = self.coordinator._loop._worker_group
        oldest = None if group is None else group.oldest_plan(time.monotonic())
        return 0.0 if oldest is None else oldest[1]

    def close(self) -> None:
        self.coordinator.stop()
        for ranks in self.ranks:
            if ranks.threads[0].ident is not None:
                ranks.join()
        self.ingress.close()
        self.context.destroy(linger=0)
