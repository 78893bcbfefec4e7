"""When candidates are trained, and what becomes of them; the head is scripted."""

from collections.abc import Sequence
from pathlib import Path

from aerie.cluster.learning.config import LearningConfig
from aerie.cluster.learning.draft_learning import DraftLearning, Pair
from aerie.cluster.learning.reservoir import Text


class Scripted:
    """A head that accepts `accepted` tokens in ten rounds of a text, the served one ten."""

    def __init__(self) -> None:
        self.rate, self.accepted = 1.0, 10
        self.trained: list[int] = []
        self.resets: list[str] = []
        self.compared: list[str] = []

    def reset(self, draft: Path) -> None:
        self.resets.append(draft.name)

    def compare_with(self, draft: Path) -> None:
        self.compared.append(draft.name)

    def train(self, texts: Sequence[Pair], num_steps: int) -> float:
        self.trained.append(len(texts))
        return 0.0

    def rounds(self, texts: Sequence[Pair]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        return [(10, 10)] * len(texts), [(10, self.accepted)] * len(texts)

    def save(self, folder: Path) -> None:
        folder.mkdir()


def learning_in(folder: Path) -> tuple[Scripted, DraftLearning]:
    config = LearningConfig(min_texts=5, held_out=0.4, versions=2, max_length=64)
    learner = Scripted()
    return learner, DraftLearning(learner, config, Path("served"), folder)


def add(learning: DraftLearning, first: int, count: int = 30, size: int = 6) -> None:
    for number in range(first, first + count):
        learning.reservoir.add(Text((number, 1), (number,) * size))


def test_only_a_better_candidate_has_files_and_few_are_kept(tmp_path: Path) -> None:
    learner, learning = learning_in(tmp_path)
    assert learning.train_candidate() is None, "no texts"
    add(learning, 0)
    candidate = learning.train_candidate()
    assert candidate is not None and candidate.gain == 0 and not candidate.folder and not list(tmp_path.iterdir())
    assert learner.trained[0] + candidate.num_texts == 30, "none is on both sides"
    assert learning.train_candidate() is None, "no new texts"
    learner.accepted = 15
    for number in range(1, 5):
        add(learning, 100 * number)
        candidate = learning.train_candidate()
        assert candidate is not None and candidate.folder == str(tmp_path / f"draft-{number}")
        assert round(candidate.gain, 3) == 0.25 and candidate.low > 0.2
        if number == 1:
            learning.serve(Path(candidate.folder))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft-1", "draft-3", "draft-4"], "1 is served"
    assert learner.compared == ["draft-1"] and not learner.resets, "it trains on"
    learner, learning = learning_in(tmp_path)
    learner.accepted = 15
    add(learning, 0)
    candidate = learning.train_candidate()
    assert candidate is not None and candidate.folder.endswith("draft-5"), "a process that starts again overwrites none"


def test_a_candidate_that_is_worse_starts_again_more_slowly(tmp_path: Path) -> None:
    learner, learning = learning_in(tmp_path)
    learner.accepted = 5
    add(learning, 0)
    candidate = learning.train_candidate()
    assert candidate is not None and candidate.high < 0 and not candidate.folder
    assert learner.resets == ["served"] and learner.rate == 0.5
    learning.serve(Path("served"), is_rollback=True)
    assert learner.rate == 0.5, "the engine has what it had"
    learning.serve(Path("former"), is_rollback=True)
    assert learner.resets[-1] == "former" and learner.rate == 0.25


def test_texts_without_an_answer_to_draft_in_are_left_out(tmp_path: Path) -> None:
    learner, learning = learning_in(tmp_path)
    add(learning, 0, size=2)
    for number in range(30):
        learning.reservoir.add(Text((number,) * 64, (1,) * 9))
    assert learning.train_candidate() is None and not learner.trained
