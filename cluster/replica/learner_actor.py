"""`DraftLearner`: the Ray actor that trains an engine's draft. Created by `aerie.cluster.replica.supervisor` on the
coordinator's node."""

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import ray

from aerie.cluster.learning.draft_learning import DraftLearning
from aerie.cluster.learning.published import News
from aerie.cluster.plan import ReplicaPlan
from aerie.cluster.start_log import use_logs
from aerie.kernels.lazy_import import load

logger = logging.getLogger(__name__)

POLL_S = 1.0
_LEARNER = "aerie.speculative.training.head_learner:HeadLearner"  # imports torch, which the engine's processes do not


class DraftLearner:
    """Learns until it is killed. folder: where candidates are written."""

    def __init__(self, plan: ReplicaPlan, folder: str) -> None:
        use_logs(plan.rank.log_format, "draft learner")
        self._plan, self._folder = plan, Path(folder)

    def run(self, coordinator: Any) -> None:
        """Take texts of the coordinator, and offer it candidates. Returns when the coordinator has ended, or if target
        or draft cannot be trained."""
        try:
            self._run(coordinator)
        except ray.exceptions.RayError as error:
            logger.warning("the coordinator has ended: %s", str(error).partition("\n")[0])
        except ValueError as error:  # `TrainingError` is one
            logger.error("the draft does not learn: %s", error)
        except Exception:  # Ray keeps it in a result that no process reads
            logger.exception("the draft does not learn")

    def _run(self, coordinator: Any) -> None:
        rank, config = self._plan.rank, self._plan.learning
        assert rank.speculative is not None and config is not None
        draft = Path(rank.speculative.path)
        if config.priority == "idle":
            use_idle_time()
        load("torch:set_num_threads")(config.threads)
        of_head = rank.speculative.method, config.learning_rate, config.batch_tokens
        learner = load(_LEARNER)(Path(rank.worker.model.path), draft, *of_head)
        learning, num_rollbacks = DraftLearning(learner, config, draft, self._folder), 0
        while True:
            try:
                raw = ray.get(coordinator.learner_news.remote())
            except ray.exceptions.RayTaskError as busy:  # its loop was busy; if it has ended, so does this actor
                logger.warning("no texts from the coordinator: %s", str(busy).rstrip().rpartition("\n")[2])
                time.sleep(POLL_S)
                continue
            news = msgspec.msgpack.decode(raw, type=News)
            learning.serve(Path(news.served), news.num_rollbacks > num_rollbacks)
            num_rollbacks = news.num_rollbacks
            for text in news.texts:
                learning.reservoir.add(text)
            candidate = learning.turn()
            if candidate is None:
                time.sleep(POLL_S)
            else:
                if error := ray.get(coordinator.offer_draft.remote(msgspec.msgpack.encode(candidate))):
                    logger.warning("a draft was not published: %s", error)


def use_idle_time() -> None:
    """Give way to all other processes of this machine."""
    with contextlib.suppress(OSError):
        os.nice(19)
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
