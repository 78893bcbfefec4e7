"""Stop strings at every place of a text, cut into tokens and deltas in every way."""

import itertools
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.cluster.http.answer import Answer, EngineFailedError, Piece, joined
from aerie.cluster.http.text.detokenizer import StopMatch, StopMatcher
from aerie.cluster.transport.messages import TokenDelta
from aerie.workers.scheduling.plan import SamplingParams
from tests.support.fake_engine import EOS, chat_tokenizer, logprobs_of, small_tokenizer
from tests.support.slow import covering


def _run(stops: list[str], parts: list[str]) -> tuple[str, str | None]:
    matcher, shown = StopMatcher(stops), ""
    for part in parts:
        result = matcher.push(part)
        if isinstance(result, StopMatch):
            return shown + result.shown, result.stop
        shown += result
    return shown + matcher.flush(), None


def _by_characters(stops: list[str], text: str) -> tuple[str, str | None]:
    """The definition: the first stop string complete, and the longest of those complete at once."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def _cuts(text: str) -> list[list[str]]:
    """All ways to cut `text`."""
    ways = []
    for cut in itertools.product([False, True], repeat=len(text) - 1):
        parts = [text[0]]
        for character, new in zip(text[1:], cut, strict=True):
            if new:
                parts.append(character)
            else:
                parts[-1] += character
        ways.append(parts)
    return ways


@pytest.mark.parametrize("stops", [["ab"], ["abc", "b"], ["aab"], ["ba", "aba", "c"], ["bb", "abab"], ["x"]])
def test_any_cut_gives_what_single_characters_give(stops: list[str]) -> None:
    for letters in itertools.product("abc", repeat=6):
        text = "".join(letters)
        expected = _by_characters(stops, text)
        for parts in random.Random(text).sample(_cuts(text), 8):
            assert _run(stops, parts) == expected, (stops, parts)


_words = st.text("ab", min_size=1, max_size=9)


@given(st.lists(_words, min_size=1, max_size=4), st.lists(st.text("ab", max_size=7), max_size=8))
def test_strings_that_repeat_themselves_are_found(stops: list[str], parts: list[str]) -> None:
    assert _run(stops, parts) == _by_characters(stops, "".join(parts))


def test_no_strings_and_text_take_the_time_of_others() -> None:
    """Comparing every end of the held text with every string took 3 ms for each character, in which no other stream
    went on."""
    matcher = StopMatcher(["ab" * 511 + last for last in "0123456789cdefg"] + ["a" * 1000])
    begin_s = time.process_time()
    assert [matcher.push("a") for _ in range(999)] == [""] * 999
    assert time.process_time() - begin_s < 1.5
    assert matcher.push("c") == "a" * 999 + "c"


def test_only_what_may_begin_a_stop_is_held_back() -> None:
    matcher = StopMatcher(["END", "<|"])
    assert [matcher.push(text) for text in ("xE", "N", "E", "q<", "<", "y")] == ["x", "", "EN", "Eq", "<", "<y"]
    assert matcher.flush() == ""


def _answer(**options: object) -> Answer:
    eos = small_tokenizer().token_to_id(EOS)
    return Answer(chat_tokenizer().detokenizer(True), eos_token_ids=frozenset({eos}), **options)  # type: ignore[arg-type]


def _feed(answer: Answer, tokens: list[int], sizes: list[int], finish: str) -> Piece:
    """Deltas of the given sizes until the answer ends; the last has the engine's finish."""
    pieces, at = [], 0
    for size in sizes:
        part = tuple(tokens[at : at + size])
        at += size
        last = at >= len(tokens)
        logprobs = logprobs_of(part, SamplingParams(max_tokens=1, logprobs=0))
        delta = TokenDelta("r", part, finish if last else None, logprobs, cached_tokens=3)
        pieces.append(answer.push(delta))
        if pieces[-1].finish is not None or last:
            break
    return joined(pieces)


def _sizes(total: int) -> list[list[int]]:
    """All ways to deal `total` tokens into deltas."""
    ways = [[]] if total == 0 else [[n, *rest] for n in range(1, total + 1) for rest in _sizes(total - n)]
    return ways


@pytest.mark.parametrize(
    ("finish", "include_stop", "stop"),
    covering(["stop", "length"], [False, True], [None, "a", "b", "c", "d", "e", "cd", "de", "cde", "f"], strength=2),
)
def test_ends_are_the_same_however_tokens_are_dealt_into_deltas(
    finish: str, include_stop: bool, stop: str | None
) -> None:
    """Five one-letter tokens, then end of sequence or the limit; everything ends exactly at the stop."""
    tokenizer = small_tokenizer()
    tokens: list[int] = tokenizer.encode("abcde").ids
    assert len(tokens) == 5
    if finish == "stop":
        tokens.append(tokenizer.token_to_id(EOS))
    at = "abcde".find(stop) if stop else -1
    if stop is not None and at >= 0:
        end = at + len(stop)
        expected = ("abcde"[: end if include_stop else at], end, "stop", stop)
    else:
        expected = ("abcde", len(tokens), finish, None)
    for sizes in _sizes(len(tokens)):
        answer = _answer(stops=[stop] if stop else [], include_stop=include_stop)
        whole = _feed(answer, tokens, sizes, finish)
        assert (whole.text, len(whole.tokens), whole.finish, whole.stop_reason) == expected, sizes
        assert list(whole.tokens) == tokens[: expected[1]]
        assert len(whole.logprobs) == len(whole.offsets) == answer.num_tokens == expected[1]
        assert [entry.logprob for entry in whole.logprobs] == [-token / 100 for token in whole.tokens]


def test_stop_token_that_is_no_end_of_sequence_is_named_and_not_shown() -> None:
    tokens = small_tokenizer().encode("ab").ids
    for include_stop, text in ((False, "a"), (True, "ab")):
        whole = _feed(_answer(include_stop=include_stop), tokens, [2], "stop")
        assert (whole.text, whole.finish, whole.stop_reason, len(whole.tokens)) == (text, "stop", tokens[1], 2)


def test_stop_string_at_the_last_permitted_token_is_a_stop() -> None:
    tokens = small_tokenizer().encode("ab").ids
    whole = _feed(_answer(stops=["b"]), tokens, [1, 1], "length")
    assert (whole.text, whole.finish, whole.stop_reason) == ("a", "stop", "b")


def test_held_back_text_is_shown_at_the_end() -> None:
    tokens = small_tokenizer().encode("abc").ids
    whole = _feed(_answer(stops=["bcd"]), tokens, [1, 1, 1], "length")
    assert (whole.text, whole.finish) == ("abc", "length")


def test_unfinished_character_is_shown_as_replacement_at_the_end() -> None:
    tokens = small_tokenizer().encode("a€").ids[:3]
    assert _feed(_answer(), tokens, [3], "length").text == "a\ufffd"


@pytest.mark.parametrize("min_tokens", range(5))
def test_stop_strings_are_looked_for_after_min_tokens(min_tokens: int) -> None:
    tokens = small_tokenizer().encode("xxxx").ids
    for sizes in _sizes(4):
        whole = _feed(_answer(stops=["x"], min_tokens=min_tokens), tokens, sizes, "length")
        expected = ("x" * min_tokens, "stop", min_tokens + 1) if min_tokens < 4 else ("xxxx", "length", 4)
        assert (whole.text, whole.finish, len(whole.tokens)) == expected, sizes


def test_last_delta_may_be_empty() -> None:
    """A resumed request can find that it had already ended."""
    answer = _answer(stops=["lox"])
    tokens = tuple(small_tokenizer().encode("hello").ids)
    assert answer.push(TokenDelta("r", tokens)).text == "hel"
    piece = answer.push(TokenDelta("r", (), "length"))
    assert (piece.text, piece.finish, answer.num_tokens) == ("lo", "length", len(tokens))


@pytest.mark.parametrize("finish", ["error", "abort"])
def test_engine_that_gives_up_is_an_error_and_not_an_end(finish: str) -> None:
    with pytest.raises(EngineFailedError, match="rank 1 died"):
        _answer().push(TokenDelta("r", (1,), finish, error="rank 1 died"))
