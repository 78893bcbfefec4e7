"""What a draft learns after its traffic has changed: texts of another kind than those before.

The head is modelled: its skill in a kind of texts grows with each text of that kind that it is trained on. Training and
measuring take time, in which further texts come. Times and skills are near those of the embedded pair on two cores
(docs/learning-draft.md).
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from aerie.cluster.learning.config import LearningConfig
from aerie.cluster.learning.draft_learning import DraftLearning, Pair
from aerie.cluster.learning.reservoir import Text

TRAIN_S, MEASURE_S = 0.3, 0.3  # of a text, with one set of weights
TEXTS_PER_STEP = 4
WORDS, PROGRAMS = 0, 1


class Pupil:
    """A head with skills: the share of its two draft tokens that are accepted.

    interference: share of its skill that a text of another kind costs.
    """

    def __init__(self, interference: float = 0.0) -> None:
        self.rate, self.now_s, self._interference = 1.0, 0.0, interference
        self.num_trained, self.num_measured = Counter[int](), 0
        self.skills, self._served = [0.0, 0.0], [0.0, 0.0]

    def reset(self, draft: Path) -> None:
        self.compare_with(draft)
        self.skills = list(self._served)

    def compare_with(self, draft: Path) -> None:
        self._served = json.loads((draft / "skills").read_text())

    def train(self, texts: Sequence[Pair], num_steps: int) -> float:
        taken = [texts[step * 7 % len(texts)] for step in range(TEXTS_PER_STEP * num_steps)]
        self.now_s += TRAIN_S * len(taken)
        for prompt, _ in taken:
            self.num_trained[prompt[0]] += 1
            for kind in (WORDS, PROGRAMS):
                skill = self.skills[kind]
                self.skills[kind] += (0.8 - skill) / 200 if kind == prompt[0] else -self._interference * skill
        return 0.0

    def rounds(self, texts: Sequence[Pair]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        self.now_s += 2 * MEASURE_S * len(texts)
        self.num_measured += len(texts)
        served, trained = (
            [(50, round(100 * skills[prompt[0]]) + prompt[1] % 7) for prompt, _ in texts]
            for skills in (self._served, self.skills)
        )
        return served, trained

    def save(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "skills").write_text(json.dumps(self.skills))


class Traffic:
    """Texts, one a second, and the learning from them."""

    def __init__(self, folder: Path, pupil: Pupil, max_loss: float = 0.2) -> None:
        (folder / "configured").mkdir()
        pupil.save(folder / "configured" / "0")
        config = LearningConfig(min_texts=8, recent_texts=64, held_out=0.3, steps=30, max_loss=max_loss)
        self.pupil, self.learning = pupil, DraftLearning(pupil, config, folder / "configured" / "0", folder)
        pupil.reset(self.learning.served)
        self._number = 0

    def run(self, kind: int, seconds: int) -> float:
        """Send texts of a kind for a time, and return the draft tokens that a round of them accepts at its end."""
        end = self._number + seconds
        while self._number < end:
            self.pupil.now_s = max(self.pupil.now_s, self._number + 1)
            while self._number < min(end, self.pupil.now_s):
                self.learning.reservoir.add(Text((kind, self._number), (1,) * 20))
                self._number += 1
            candidate = self.learning.train_candidate()
            if candidate is not None and candidate.folder:
                self.learning.serve(Path(candidate.folder))
        skills: list[float] = json.loads((self.learning.served / "skills").read_text())
        return 2 * skills[kind]


def test_acceptance_of_new_texts_rises_soon_however_many_old_texts_there_are(tmp_path: Path) -> None:
    """A quarter of an hour of word problems, then five minutes of programs."""
    traffic = Traffic(tmp_path, Pupil())
    learned = traffic.run(WORDS, 900)
    assert learned > 1.4
    assert 1 + traffic.run(PROGRAMS, 300) > 2.0


def test_half_of_the_texts_that_are_trained_on_are_old_and_no_candidate_costs_more_than_the_first(
    tmp_path: Path,
) -> None:
    pupil = Pupil()
    traffic = Traffic(tmp_path, pupil)
    traffic.run(WORDS, 900)
    traffic.run(PROGRAMS, 70)  # now the newest 64 are programs
    pupil.num_trained.clear()
    pupil.num_measured = 0
    for number in range(970, 978):
        traffic.learning.reservoir.add(Text((PROGRAMS, number), (1,) * 20))
    assert traffic.learning.train_candidate() is not None
    assert 0.4 < pupil.num_trained[PROGRAMS] / pupil.num_trained.total() < 0.6
    assert pupil.num_measured <= 64


@pytest.mark.parametrize(("max_loss", "is_published"), [(0.2, False), (1.0, True)])
def test_a_draft_that_has_forgotten_older_texts_is_not_published(
    tmp_path: Path, max_loss: float, is_published: bool
) -> None:
    pupil = Pupil()
    traffic = Traffic(tmp_path, pupil, max_loss=max_loss)
    traffic.run(WORDS, 600)
    pupil.skills = [0.1, 0.5]
    for number in range(600, 664):
        traffic.learning.reservoir.add(Text((PROGRAMS, number), (1,) * 20))
    candidate = traffic.learning.train_candidate()
    assert candidate is not None and candidate.low > 0.2 and bool(candidate.folder) is is_published


def test_the_rate_recovers_once_a_trained_draft_is_served_again(tmp_path: Path) -> None:
    traffic = Traffic(tmp_path, Pupil())
    rate = traffic.pupil.rate = traffic.learning._config.learning_rate
    traffic.run(WORDS, 60)
    traffic.learning.serve(tmp_path / "configured" / "0", is_rollback=True)
    assert traffic.pupil.rate == rate / 2
    traffic.run(WORDS, 120)
    assert traffic.pupil.rate == rate
