"""`DraftLearner`: the Ray actor that trains an engine's draft. Created by `aerie.cluster.replica.supervisor` on the
coordinator's node."""

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import ray

from aerie.cluster.learning.draft_learning import DraftLearning
from aerie.cluster.learning.engine_busy import EngineBusy
from aerie.cluster.learning.gate import Candidate
from aerie.cluster.learning.published import News
from aerie.cluster.learning.replica_first import ReplicaFirst, leader
from aerie.cluster.plan import ReplicaPlan
from aerie.cluster.start_log import use_logs
from aerie.cluster.transport.discovery import named_coordinators
from aerie.cluster.transport.messages import EngineStats
from aerie.kernels.lazy_import import load

logger = logging.getLogger(__name__)

POLL_S = 1.0  # seconds between two looks for work
ANSWER_S = 30.0  # limit of another engine's answer
_LEARNER = "aerie.speculative.training.head_learner:HeadLearner"  # imports torch, which the engine's processes do not


class DraftLearner:
    """Learns until it is killed. folder: where candidates are written."""

    def __init__(self, plan: ReplicaPlan, folder: str) -> None:
        use_logs(plan.rank.log_format, "draft learner")
        self._plan, self._folder = plan, Path(folder)

    def run(self, prefix: str, name: str) -> None:
        """Train the draft while this engine leads. Returns when its coordinator has ended, or if target or draft cannot
        be trained.

        prefix: prefix of the names of the application's coordinators.
        name: name of this engine's coordinator.
        """
        try:
            self._run(prefix, name)
        except ray.exceptions.RayError as error:
            logger.warning("the coordinator has ended: %s", str(error).partition("\n")[0])
        except ValueError as error:  # `TrainingError` is one
            logger.error("the draft does not learn: %s", error)
        except Exception:  # Ray keeps it in a result that no process reads
            logger.exception("the draft does not learn")

    def _run(self, prefix: str, name: str) -> None:
        """Train whenever coordinator `name` is the leader of those whose names begin with `prefix`, until it ends."""
        rank, config = self._plan.rank, self._plan.learning
        assert rank.speculative is not None and config is not None
        if config.priority != "normal":
            use_idle_time()
        load("torch:set_num_threads")(config.threads)
        first: ReplicaFirst | None = None
        coordinators = dict[str, Any]()
        while True:
            coordinators = named_coordinators(prefix, coordinators)
            if name not in coordinators:
                return
            if leader(_learned(coordinators)) != name:
                time.sleep(POLL_S)
                continue
            if first is None:
                first = ReplicaFirst(self._learning(), config.canary_rounds)
            links = {engine: CoordinatorLink(actor, engine == name) for engine, actor in coordinators.items()}
            try:
                was_due = first.run_once(links.pop(name), links)
            except ray.exceptions.RayTaskError as busy:  # its loop was busy; if it has ended, so does this actor
                logger.warning("no answer of the coordinator: %s", str(busy).rstrip().rpartition("\n")[2])
                was_due = False
            if not was_due:
                time.sleep(POLL_S)

    def _learning(self) -> DraftLearning:
        """Load the draft and its learner."""
        rank, config = self._plan.rank, self._plan.learning
        assert rank.speculative is not None and config is not None
        head, draft = rank.speculative, Path(rank.speculative.path)
        head_settings = head.method, config.learning_rate, config.batch_tokens, head.num_steps
        busy_file = self._plan.busy_file
        wait = EngineBusy(Path(busy_file)).wait_until_idle if busy_file else None
        learner = load(_LEARNER)(Path(rank.worker.model.path), draft, *head_settings, wait)
        return DraftLearning(learner, config, draft, self._folder)


@dataclass(frozen=True)
class CoordinatorLink:
    """See `aerie.cluster.learning.replica_first.EngineLink`. is_own: its errors are raised."""

    actor: Any
    is_own: bool

    def news(self) -> News | None:
        """Return new texts and the served draft; None if another engine's coordinator does not answer."""
        try:
            raw = ray.get(self.actor.learner_news.remote(), timeout=None if self.is_own else ANSWER_S)
        except ray.exceptions.RayError:
            if self.is_own:
                raise
            return None
        return msgspec.msgpack.decode(raw, type=News)

    def offer(self, candidate: Candidate) -> str:
        """Offer a draft. Return an error or ""."""
        try:
            return str(ray.get(self.actor.offer_draft.remote(msgspec.msgpack.encode(candidate))))
        except ray.exceptions.RayError as error:
            if self.is_own:
                raise
            return str(error).partition("\n")[0]


def _learned(coordinators: Mapping[str, Any]) -> dict[str, bool]:
    """Return for each engine whether it serves a draft that has learned; False if it does not answer."""
    asked = {name: actor.stats.remote() for name, actor in coordinators.items()}
    known = dict.fromkeys(asked, False)
    for name, reply in asked.items():
        with contextlib.suppress(ray.exceptions.RayError):
            known[name] = msgspec.msgpack.decode(ray.get(reply, timeout=ANSWER_S), type=EngineStats).draft_version > 0
    return known


def use_idle_time() -> None:
    """Give way to all other processes of this machine."""
    with contextlib.suppress(OSError):
        os.nice(19)
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
