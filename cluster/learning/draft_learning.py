"""Turns texts into candidates: trains a head, and compares it with the served weights on texts that it has not seen.
Without Ray; `aerie.cluster.replica.learner_actor` runs it.

Traffic changes, so half of a candidate's texts are recent, and recent texts alone decide whether it is better. The
other half are older ones: replaying them keeps a head from forgetting (Rolnick et al., arXiv 1811.11682). Both halves
are bounded, so that a candidate costs the same however many texts are in memory.
"""

import logging
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from aerie.cluster.learning.config import LearningConfig
from aerie.cluster.learning.gate import Candidate, Gain, gain_of
from aerie.cluster.learning.reservoir import Reservoir, Text

logger = logging.getLogger(__name__)

_MIN_ANSWER = 2  # tokens: the first round drafts after an answer's first token
Pair = tuple[Sequence[int], Sequence[int]]  # a prompt and its answer


class Learner(Protocol):
    """A head in training: `aerie.speculative.training.head_learner.HeadLearner`."""

    rate: float

    def reset(self, draft: Path) -> None: ...
    def compare_with(self, draft: Path) -> None: ...
    def train(self, texts: Sequence[Pair], num_steps: int) -> float: ...
    def rounds(self, texts: Sequence[Pair]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]: ...
    def save(self, folder: Path) -> None: ...


class DraftLearning:
    """The learning of one engine's draft.

    served: folder of the weights that the engine has.
    folder: where candidates are written.
    """

    def __init__(self, learner: Learner, config: LearningConfig, served: Path, folder: Path) -> None:
        self._learner, self._config, self._folder = learner, config, folder
        self.served = served
        self.reservoir = Reservoir(config.memory_tokens, config.key_share, config.held_out)
        self._random = random.Random(0)
        self._newest: Path | None = None  # newest published version of the weights trained since the last reset
        self._next_at = config.min_texts  # texts, after which a candidate is due
        self._num_saved = max(map(_number, folder.glob("draft-*")), default=0)  # a former process's may be served

    def serve(self, folder: Path, is_rollback: bool = False) -> None:
        """Learn on from the weights that the engine has from now on. is_rollback: those before have failed, so learn
        more slowly, until a draft is served again that this learner has trained."""
        if folder == self.served:
            return
        self.served = folder
        if folder == self._newest and not is_rollback:
            self._learner.rate = min(self._config.learning_rate, 2 * self._learner.rate)
            self._learner.compare_with(folder)
            return
        self._learner.rate /= 2 if is_rollback else 1
        self._reset()

    def train_candidate(self) -> Candidate | None:
        """Train and measure a candidate, if there are enough new texts."""
        if self.reservoir.num_added < self._next_at:
            return None
        (train, held), (old_train, old_held) = (
            [self._pairs(texts) for texts in part] for part in self.reservoir.split(self._config.recent_texts)
        )
        if not train or not held or len(held) + len(old_held) < self._config.min_texts:
            return None
        self._next_at = self.reservoir.num_added + self._config.min_texts
        self._learner.train([*train, *self._drawn(old_train, len(train))], self._config.steps)
        try:
            found = gain_of(*self._learner.rounds(held), seed=self.reservoir.num_added)
        except ValueError:  # answers too short to draft in
            return None
        if found.high < 0:  # worse for certain: start again
            self._learner.rate /= 2
            self._reset()
        if found.low <= self._config.min_gain or self._has_forgotten(self._drawn(old_held, len(held))):
            return Candidate(*found, len(held))
        return self._saved(found, len(held))

    def _has_forgotten(self, held: Sequence[Pair]) -> bool:
        """Return whether the trained weights are worse than `max_loss` allows on older texts."""
        if not held:
            return False
        try:
            found = gain_of(*self._learner.rounds(held), seed=self.reservoir.num_added)
        except ValueError:
            return False
        if has_forgotten := found.high < -self._config.max_loss:
            logger.info("a draft is not published: on older texts it is worse by %.1f %%", -100 * found.gain)
        return has_forgotten

    def _drawn(self, pairs: Sequence[Pair], count: int) -> list[Pair]:
        return self._random.sample(pairs, min(len(pairs), count))

    def _reset(self) -> None:
        self._newest = None
        self._learner.reset(self.served)

    def _saved(self, found: Gain, num_texts: int) -> Candidate:
        """Save the trained draft as a candidate, and remove files of older ones that are not served."""
        self._num_saved += 1
        folder = self._folder / f"draft-{self._num_saved}"
        self._learner.save(folder)
        self._newest = folder
        for old in sorted(self._folder.glob("draft-*"), key=_number)[: -self._config.versions]:
            if old != self.served:
                shutil.rmtree(old)
        return Candidate(*found, num_texts, str(folder))

    def _pairs(self, texts: Sequence[Text]) -> list[Pair]:
        """Return texts without their ends beyond `max_length`, if there is an answer to draft in."""
        limit = self._config.max_length
        cut = [(text.prompt, text.answer[: max(0, limit - len(text.prompt))]) for text in texts]
        return [(prompt, answer) for prompt, answer in cut if len(answer) > _MIN_ANSWER]


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("draft-"))
