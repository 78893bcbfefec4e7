"""The sample answers of a grammar's trial: each finds slow masks that the answers before it pass by."""

from types import SimpleNamespace

import pytest
from torch import Tensor

from aerie.workers.scheduling.plan import Grammar
from aerie.workers.structured_output.compiler import Vocabulary
from aerie.workers.structured_output.mask_process import trial
from aerie.workers.structured_output.mask_process.matcher import Matcher
from tests.support import MODELS
from tests.support.slow import slow
from tests.support.structured_output.hostile import STOPS

ANYTHING = Grammar("regex", "[ -~\\n]{0,5000}", STOPS)
PREFERRED = ("longest", "shortest", *(text.decode() for text in trial._REPEATED))  # in the order of the trial


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(str(MODELS / "target"), 4096)


@pytest.mark.parametrize("slow", [None, *PREFERRED[:3], *slow(*PREFERRED[3:])])
def test_each_sample_answer_finds_what_those_before_it_pass_by(
    vocabulary: Vocabulary, slow: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks are slow after 20 tokens of one kind of answer."""
    texts = vocabulary.tokens(STOPS, False).decoded_vocab
    first = next(text for text in texts if len(text) == 1 and b" " <= text <= b"~")
    answers: list[list[bytes]] = []
    now_s = 0.0
    fill, take = Matcher.fill, Matcher.take

    def is_slow() -> bool:
        taken = answers[-1]
        if slow is None or len(taken) < 20:
            return False
        if slow == "longest":
            return min(map(len, taken)) > 3
        wanted = first if slow == "shortest" else slow.encode()
        return set(taken) == {wanted}

    def filled(self: Matcher, words: Tensor, row: int = 0) -> None:
        nonlocal now_s
        if id(self) not in seen:
            seen[id(self)] = self
            answers.append([])
        now_s += 0.3 if is_slow() else 1e-4
        fill(self, words, row)

    def taken(self: Matcher, token: int) -> bool:
        answers[-1].append(texts[token])
        return take(self, token)

    seen: dict[int, Matcher] = {}
    monkeypatch.setattr(Matcher, "fill", filled)
    monkeypatch.setattr(Matcher, "take", taken)
    monkeypatch.setattr(trial, "time", SimpleNamespace(thread_time=lambda: now_s))
    fault = trial.try_grammar(ANYTHING, vocabulary).fault
    if slow is None:
        assert not fault and len(answers) == len(PREFERRED)
        return
    assert fault.startswith("a token of an answer takes 0.30 s"), fault
    assert len(answers) == PREFERRED.index(slow) + 1
