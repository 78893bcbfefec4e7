"""What the compiler of an engine makes of grammars, one after the other, and what it says of those it refuses."""

import itertools
import json
import random
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import xgrammar

from aerie.workers.scheduling.plan import Grammar
from aerie.workers.structured_output.compiler import MAX_FAULT_CHARS, GrammarCompiler, Vocabulary
from aerie.workers.structured_output.mask_messages import InvalidGrammarError
from aerie.workers.structured_output.mask_process.matcher import Matcher
from tests.support import MODELS
from tests.support.embedded import eos_token_ids

VOCAB, STOPS = 4096, eos_token_ids()
VOCABULARY = Vocabulary(MODELS / "target", VOCAB)


def _ebnf(text: str) -> Grammar:
    return Grammar("ebnf", text, STOPS)


def _tag(form: object) -> Grammar:
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": form}), STOPS)


def _only(tokens: Iterable[int]) -> Grammar:
    """As `allowed_token_ids` gives it."""
    each = [{"type": "token", "token": token} for token in tokens]
    return _tag({"type": "plus", "content": {"type": "or", "elements": each}})


def _between(token: int) -> Grammar:
    mark = {"type": "token", "token": token}
    return _tag({"type": "tag", "begin": mark, "content": {"type": "regex", "pattern": "[0-9]"}, "end": mark})


def _allowed(matcher: Matcher) -> list[int]:
    words = xgrammar.allocate_token_bitmask(1, VOCAB)
    matcher.fill(words)
    bits = np.unpackbits(words[0].numpy().view(np.uint8), bitorder="little")[:VOCAB]
    return [int(token) for token in np.flatnonzero(bits)]


def _check_masks(cached: Matcher, fresh: Matcher, draw: random.Random, num_tokens: int) -> None:
    """Both allow the same tokens along a random answer, and take what they allow."""
    for _ in range(num_tokens):
        allowed = _allowed(fresh)
        assert _allowed(cached) == allowed
        going_on = [token for token in allowed if token not in STOPS]
        if not going_on:
            return
        token = draw.choice(going_on)
        assert fresh.take(token) and cached.take(token)


def _check_one_after_the_other(grammars: Sequence[Grammar], num_tokens: int = 6) -> None:
    shared, draw = GrammarCompiler(VOCABULARY), random.Random(0)
    for grammar in grammars:
        fresh = GrammarCompiler(VOCABULARY, caches=False).compile(grammar)
        _check_masks(Matcher(shared.compile(grammar)), Matcher(fresh), draw, num_tokens)


@pytest.mark.parametrize(
    "grammars",
    [
        [_only([5]), _only([6]), _only([5, 6]), _only([7, 8])],
        [_between(300), _between(301)],
        [_ebnf(f'root ::= s\ns ::= Token({token}) s | "a"') for token in (300, 301)],
        [_ebnf(f'root ::= ExcludeToken({token}) "a"') for token in (300, 301)],
        [_ebnf(f'root ::= TokenTagDispatch(({token}, s))\ns ::= "a"') for token in (300, 301)],
        [_tag({"type": "any_tokens", "exclude_tokens": [token]}) for token in (300, 301)],
        [_tag({"type": "any_text", "excludes": [text]}) for text in ("a", "b", "foo")],
        [Grammar("regex", f"[a-z]{{{low},{high}}}", STOPS) for low, high in itertools.combinations((1, 3, 40, 200), 2)],
    ],
    ids=lambda grammars: grammars[0].text[:60],
)
def test_a_grammar_means_the_same_whatever_was_compiled_before(grammars: list[Grammar]) -> None:
    _check_one_after_the_other(grammars)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("имя ::= root", "Unexpected character: \ufffd"),
        ("root ::= [é", "Unterminated character class"),
        ("root ::= " + "x" * 60_000, "xxx..."),
    ],
)
def test_a_refusal_is_one_short_line_in_any_language(text: str, said: str) -> None:
    with pytest.raises(InvalidGrammarError) as caught:
        GrammarCompiler(VOCABULARY).compile(_ebnf(text))
    assert said in str(caught.value) and "\n" not in str(caught.value) and "codec" not in str(caught.value)
    assert len(str(caught.value)) <= MAX_FAULT_CHARS + 3
