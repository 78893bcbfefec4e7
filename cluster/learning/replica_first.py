"""One engine trains for all engines of an application, and its drafts go to the others once they have proved themselves
on it. Without Ray; `aerie.cluster.replica.learner_actor` runs it."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from aerie.cluster.learning.draft_learning import DraftLearning
from aerie.cluster.learning.gate import Candidate
from aerie.cluster.learning.published import News

logger = logging.getLogger(__name__)


class EngineLink(Protocol):
    """An engine's coordinator."""

    def news(self) -> News | None:
        """Return what has happened since the last call; None if the engine does not answer."""

    def offer(self, candidate: Candidate) -> str:
        """Publish a candidate there, if it is better. Return an error or ""."""


def leader(learned: Mapping[str, bool]) -> str:
    """Return the engine that trains. learned: by engine, whether it serves a draft that has learned: engines that start
    later do not take over with the configured one."""
    return min(learned, key=lambda name: (not learned[name], name))


class ReplicaFirst:
    """The publishing of the engine that trains.

    canary_rounds: rounds that a draft serves there before other engines get it. Meanwhile nothing is trained.
    """

    def __init__(self, learning: DraftLearning, canary_rounds: int) -> None:
        self._learning, self._canary_rounds = learning, canary_rounds
        self._num_rollbacks = 0
        self._published: dict[str, Candidate] = {}  # by folder
        self._offered: set[tuple[str, str]] = set()  # engine and folder

    def run_once(self, own: EngineLink, others: Mapping[str, EngineLink]) -> bool:
        """Take the texts of all engines; pass a draft on that has proved itself; train another. Return whether a
        candidate was measured.

        own: the engine that trains; it must answer.
        """
        news = own.news()
        assert news is not None, "its loss ends this process"
        if Path(news.served).is_dir():  # the engine that wrote it may be gone, with its files
            self._learning.serve(Path(news.served), news.num_rollbacks > self._num_rollbacks)
        self._num_rollbacks = news.num_rollbacks
        others_news = {name: engine_news for name, link in others.items() if (engine_news := link.news()) is not None}
        for text in (text for engine_news in (news, *others_news.values()) for text in engine_news.texts):
            self._learning.reservoir.add(text)
        if (draft := self._published.get(news.served)) is not None and others:
            if news.num_rounds < self._canary_rounds:
                return False
            for name, engine_news in others_news.items():
                self._pass_on(draft, name, others[name], engine_news)
        candidate = self._learning.train_candidate()
        if candidate is None:
            return False
        if error := own.offer(candidate):
            logger.warning("a draft was not published: %s", error)
        elif candidate.folder:
            self._published[candidate.folder] = candidate
        return True

    def _pass_on(self, draft: Candidate, name: str, link: EngineLink, news: News) -> None:
        """Offer a draft to another engine once; one that has taken it back does not get it again."""
        if news.served == draft.folder or (name, draft.folder) in self._offered:
            return
        self._offered.add((name, draft.folder))
        if error := link.offer(draft):
            logger.warning("engine %s has not published a draft: %s", name, error)
