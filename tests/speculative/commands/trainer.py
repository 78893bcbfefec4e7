"""A trainer in a thread, and an engine that gets weights from it, without transport."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from torch import Tensor

from aerie.cluster.coordinator.coordinator import TransferCalls
from aerie.cluster.transport.admin import FinishUpdate, JoinTrainer, TransferCall
from aerie.workers.distributed.ports import free_port
from aerie.workers.distributed.weight_transfer.sender import WeightSender, announcement
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.scheduling.commands.command import (
    CommandAnswer,
    LoadedWeights,
    OpenTransfer,
    ReceiveWeights,
    StartUpdate,
    Work,
)


class Trainer:
    """Calls an engine as a trainer does over HTTP, while the engine's thread, the caller's, runs steps."""

    def __init__(self, engine: LocalEngine, num_ranks: int = 1, packed: bool = True, buffer_bytes: int = 4096) -> None:
        self.engine = engine
        self.num_ranks, self.packed, self.buffer_bytes = num_ranks, packed, buffer_bytes
        self.sender: WeightSender | None = None
        self.timeout_s = 20.0
        self._commands: list[tuple[Work, Future[Sequence[CommandAnswer]]]] = []
        self._calls = TransferCalls("e", self._carry_out)

    def _carry_out(self, work: Work) -> "Future[Sequence[CommandAnswer]]":
        answers: Future[Sequence[CommandAnswer]] = Future()
        self._commands.append((work, answers))
        return answers

    def call(self, call: TransferCall, beside: Callable[[], object] = lambda: None) -> tuple[str, LoadedWeights]:
        """The engine's answer to a call, while steps run. beside: the trainer's part, in a thread of its own."""
        found: list[tuple[str, LoadedWeights]] = []
        threads = [threading.Thread(target=lambda: found.append(self._calls.call(call)))]
        threads += [threading.Thread(target=beside)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 60
        while any(thread.is_alive() for thread in threads):
            assert time.monotonic() < deadline, "a call of a transfer does not end"
            while self._commands:
                work, answers = self._commands.pop(0)
                self.engine.scheduler.add_command(work, answers.set_result)
            self.engine.step()
            if not self.engine.scheduler.num_running:
                time.sleep(0.0005)
        return found[0]

    def join(self) -> str:
        """Join a group, and return the engine's error."""
        port = free_port()
        opened = OpenTransfer("127.0.0.1", port, 1, self.num_ranks + 1, self.packed, self.buffer_bytes, self.timeout_s)

        def enter() -> None:
            self.sender = None
            limits = {"packed": self.packed, "buffer_bytes": self.buffer_bytes, "timeout_s": self.timeout_s}
            self.sender = WeightSender("127.0.0.1", port, self.num_ranks + 1, **limits)  # type: ignore[arg-type]

        return self.call(JoinTrainer({"e": 1}, opened), enter)[0]

    def start(self, model: str = "target") -> str:
        return self.call(StartUpdate(model))[0]

    def update(self, tensors: Mapping[str, Tensor], beside: Callable[[], object] | None = None) -> str:
        """Send tensors, and return the engine's error. beside: replaces the sending."""
        return self.call(received(tensors), beside or (lambda: self.send(tensors)))[0]

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        assert self.sender is not None
        self.sender.send(tensors)

    def finish(self, version: str = "") -> tuple[str, LoadedWeights]:
        return self.call(FinishUpdate(version))


def received(tensors: Mapping[str, Tensor]) -> ReceiveWeights:
    """The command for tensors that are announced truly."""
    info = announcement(tensors)
    return ReceiveWeights(tuple(info["names"]), tuple(info["dtype_names"]), tuple(info["shapes"]))
