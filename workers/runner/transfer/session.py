"""One rank's end of transfers of weights: handles `OpenTransfer`, `StartUpdate`, `ReceiveWeights`, `CloseTransfer` and
`InspectTransfer`. Built by `aerie.workers.runner.build`.

Joining and receiving run in a thread, on a stream of their own, while steps run. The thread never touches running
weights: these change in `WeightUpdate`, between two steps.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from aerie.kernels.capability import Capability
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.distributed.weight_transfer.group import Rendezvous, TransferError, TransferGroup
from aerie.workers.distributed.weight_transfer.join import join
from aerie.workers.distributed.weight_transfer.wire import Announced, announced, broadcasts, cut
from aerie.workers.models.weights import CheckpointTensor
from aerie.workers.runner.commands import CommandHandlers
from aerie.workers.runner.transfer.receive_memory import ReceiveMemory
from aerie.workers.runner.transfer.staging import Staging
from aerie.workers.runner.weight_update import Read, RunningModel
from aerie.workers.scheduling.commands.command import (
    CloseTransfer,
    InspectTransfer,
    OpenTransfer,
    ReceiveWeights,
    StartUpdate,
    TransferState,
)

logger = logging.getLogger(__name__)

_GRACE_S = 10.0  # after a limit, in which the thread should report it itself
IDLE_S = 600.0  # after which a session without a call ends: its trainer is lost


@dataclass
class _Job:
    """Work in a thread. Read its results once the thread has ended.

    deadline_s: end of the session, by `time.monotonic`.
    joined: the group that it has joined, if that is the work.
    error: why it failed.
    """

    run: Callable[[], TransferGroup | None]
    deadline_s: float
    joined: TransferGroup | None = None
    error: str = ""
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name="weight transfer", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        """Run the work in its thread, and keep its result or its error."""
        try:
            with torch.inference_mode():
                self.joined = self.run()
        except (TransferError, ValueError) as error:
            self.error = str(error)
        except Exception as error:  # such as no memory: this transfer fails, serving goes on
            logger.exception("a transfer of weights failed")
            self.error = f"{type(error).__name__}: {error}"


class WeightTransfer:
    """A rank's group with a trainer, and its open session; at most one of each.

    models: the engine's models by name, "target" first.
    """

    def __init__(self, models: Mapping[str, RunningModel], group: TPGroup, device: torch.device) -> None:
        self._models, self._tp_group, self._device = models, group, device
        self._memory = ReceiveMemory(device)
        self._opened: OpenTransfer | None = None
        self._group: TransferGroup | None = None
        self._staging: Staging | None = None
        self._last: tuple[Announced, ...] = ()
        self._job: _Job | None = None
        self._error = ""
        self._touched_s = 0.0

    def register(self, handlers: CommandHandlers) -> None:
        """Carry out the commands of transfers."""
        handlers.add(OpenTransfer, self.open)
        handlers.add(StartUpdate, self.start)
        handlers.add(ReceiveWeights, self.receive)
        handlers.add(CloseTransfer, self.close)
        handlers.add(InspectTransfer, self.inspect)

    def inspect(self, work: InspectTransfer = InspectTransfer()) -> TransferState:  # noqa: B008 - frozen
        """Return the state. Ends what has failed or takes too long."""
        job = self._job
        if job is not None and job.thread.is_alive() and time.monotonic() > job.deadline_s:
            job.error = "the transfer takes too long"
        elif job is not None and job.thread.is_alive():
            return self._state(True)
        if job is not None:
            self._job = None
            self._group = job.joined or self._group
            if job.error:
                self._end(job.error)
        return self._state(False)

    def _state(self, is_busy: bool) -> TransferState:
        """Return the session's state. is_busy: work is running, so parts of the state are not known."""
        staging = self._staging
        if staging is None:
            return TransferState(is_busy, self._error)
        if is_busy:
            return TransferState(True, session=staging.model, num_bytes=staging.num_bytes)
        return TransferState(
            False,
            self._error,
            session=staging.model,
            staged=staging.models,
            uncovered=staging.uncovered(),
            num_bytes=staging.num_bytes,
        )

    def open(self, work: OpenTransfer) -> TransferState:
        """Begin to join a group. An earlier group and its session end."""
        rank = work.rank + self._tp_group.rank
        if not 0 < rank < work.size:
            raise ValueError(f"rank_offset: rank {rank} is not between the trainer's, 0, and world_size={work.size}")
        self._end("")
        self._opened = work
        where = Rendezvous(work.address, work.port, rank, work.size, work.timeout_s, work.unique_id)

        def enter() -> TransferGroup:
            return join(where, self._device, Capability.of(self._device).collectives)

        self._job = _Job(enter, time.monotonic() + work.timeout_s + _GRACE_S)
        return self._state(True)

    def start(self, work: StartUpdate) -> TransferState:
        """Open a session. Raises ValueError if one is open, or without a group."""
        self._must_be_idle()
        if self._staging is not None and time.monotonic() < self._touched_s + IDLE_S:
            raise ValueError(f"a weight update of the {self._staging.model} is open; finish it first")
        if self._group is None:
            raise ValueError(self._error or "no trainer has called /init_weight_transfer_engine")
        staging = Staging(work.model, self._models, self._memory)
        self._memory.begin()
        self._staging, self._touched_s = staging, time.monotonic()
        return self._state(False)

    def receive(self, work: ReceiveWeights) -> TransferState:
        """Begin to receive. Raises ValueError without a session, and if headers cannot be read."""
        self._must_be_idle()
        staging, opened, group = self._staging, self._opened, self._group
        if staging is None or opened is None or group is None:
            raise ValueError(self._error or "no weight update is open; call /start_weight_update first")
        tensors = announced(work.names, work.dtypes, work.shapes) or self._last
        if not tensors:
            raise ValueError("names: must not be empty the first time")
        packed = opened.packed if work.packed is None else work.packed
        chunks = tuple(broadcasts(tensors, packed, opened.buffer_bytes))

        def fetch() -> TransferGroup:
            """Receive the announced tensors, one broadcast after another."""
            staging.check(tensors)
            with self._memory.own_stream():
                for chunk in chunks:
                    num_bytes = sum(entry.num_bytes for entry in chunk)
                    buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
                    if num_bytes:
                        group.broadcast(buffer)
                    for tensor, received in cut(buffer, chunk):
                        staging.add(tensor, received)
            return group

        self._last, self._touched_s = tensors, time.monotonic()
        self._job = _Job(fetch, self._touched_s + opened.timeout_s * (len(chunks) + 1) + _GRACE_S)
        return self._state(True)

    def close(self, work: CloseTransfer) -> TransferState:
        """End group and session."""
        self._end("")
        return self._state(False)

    def staged(self, model: str) -> tuple[Read, tuple[str, ...]]:
        """See `StagedWeights`."""
        state = self.inspect()
        if self._staging is None or state.is_busy:
            raise ValueError(self._error or ("tensors still arrive" if state.is_busy else "no weight update is open"))
        staging = self._staging

        def read(device: torch.device) -> Iterable[CheckpointTensor]:
            return staging.read(model)

        return read, staging.missing(model)

    def loaded(self) -> None:
        """See `StagedWeights`."""
        if not Capability.of(self._device).shares_host_memory:
            torch.cuda.synchronize(self._device)  # the copies have ended before their sources are freed
        self._staging = None

    def _must_be_idle(self) -> None:
        if self.inspect().is_busy:
            raise ValueError("the trainer's last call is not done: tensors still arrive, or ranks still join")

    def _end(self, error: str) -> None:
        """Leave the group and drop what came. error: why, for the next calls."""
        group, self._group, self._staging, self._opened = self._group, None, None, None
        self._error, self._job, self._last = error, None, ()
        if group is not None:
            group.close()
