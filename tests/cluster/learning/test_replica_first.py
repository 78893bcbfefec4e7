"""Which engine trains, and when the others get its draft; engines and the head are scripted."""

from dataclasses import dataclass, field
from pathlib import Path

from aerie.cluster.learning.gate import Candidate
from aerie.cluster.learning.published import News
from aerie.cluster.learning.replica_first import ReplicaFirst, leader
from aerie.cluster.learning.reservoir import Text
from tests.cluster.learning.test_draft_learning import learning_in


@dataclass
class Engine:
    """Serves what it is offered."""

    served: str = "served"
    num_rounds: int = 0
    num_rollbacks: int = 0
    error: str = ""
    is_lost: bool = False
    texts: list[Text] = field(default_factory=list)
    offered: list[str] = field(default_factory=list)

    def news(self) -> News | None:
        texts, self.texts = tuple(self.texts), []
        return None if self.is_lost else News(texts, self.served, self.num_rollbacks, self.num_rounds)

    def offer(self, candidate: Candidate) -> str:
        self.offered.append(Path(candidate.folder).name)
        if candidate.folder and not self.error:
            self.served, self.num_rounds = candidate.folder, 0
        return self.error

    def write(self, first: int, count: int = 30) -> None:
        self.texts += [Text((number, 1), (number,) * 6) for number in range(first, first + count)]


def test_a_draft_serves_on_one_engine_before_the_others_get_it(tmp_path: Path) -> None:
    learner, learning = learning_in(tmp_path)
    learner.accepted = 15
    first, own, other = ReplicaFirst(learning, 100), Engine(), Engine()
    own.write(0, 15)
    other.write(100, 15)
    assert first.run_once(own, {"b": other}) and learning.reservoir.num_added == 30, "texts of both"
    assert own.offered == ["draft-1"] and other.offered == []
    own.write(1000)
    assert not first.run_once(own, {"b": other}), "on trial, so nothing is trained"
    own.num_rounds = 99
    assert not first.run_once(own, {"b": other}) and other.offered == []
    own.num_rounds = 100
    late, lost = Engine(), Engine(is_lost=True)
    assert first.run_once(own, {"b": other, "c": late, "d": lost}), "the next candidate"
    assert other.offered == late.offered == ["draft-1"] and lost.offered == []
    assert own.offered == ["draft-1", "draft-2"] and Path(own.served).name == "draft-2"


def test_a_draft_that_is_taken_back_reaches_no_other_engine(tmp_path: Path) -> None:
    learner, learning = learning_in(tmp_path)
    learner.accepted = 15
    first, own, other = ReplicaFirst(learning, 100), Engine(), Engine()
    own.write(0)
    assert first.run_once(own, {"b": other})
    (tmp_path / "configured").mkdir()
    own.served, own.num_rounds, own.num_rollbacks = str(tmp_path / "configured"), 5000, 1
    assert not first.run_once(own, {"b": other}) and other.offered == []
    assert learner.rate == 0.5 and learner.resets[-1] == "configured"
    own.write(500)
    assert first.run_once(own, {"b": other}) and own.offered == ["draft-1", "draft-2"]
    own.num_rounds = 100
    first.run_once(own, {"b": other})
    other.served = "served"  # has taken it back
    first.run_once(own, {"b": other})
    assert other.offered == ["draft-2"], "once"


def test_one_engine_alone_learns_on_without_a_trial_and_a_refused_draft_is_not_passed_on(tmp_path: Path) -> None:
    learner, learning = learning_in(tmp_path)
    learner.accepted = 15
    first, own = ReplicaFirst(learning, 100), Engine()
    for number in range(3):
        own.write(100 * number)
        assert first.run_once(own, {})
    assert own.offered == ["draft-1", "draft-2", "draft-3"]
    own.error, other = "another draft is being loaded", Engine(served="x")
    own.num_rounds = 1000
    own.write(900)
    assert first.run_once(own, {"b": other})
    assert own.offered[-1] == "draft-4" and other.offered == ["draft-3"]


def test_the_engine_that_has_learned_leads_also_when_another_starts() -> None:
    assert leader({"b": False, "a": False}) == "a" and leader({"a": False, "b": True}) == "b"
    assert leader({"a": True, "b": True}) == "a"
