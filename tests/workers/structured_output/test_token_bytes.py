"""One fact of a vocabulary, for the HTTP API and for grammars alike: the bytes of each token, for published kinds of
tokenizers, also those that cannot spell every byte."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xgrammar
from tokenizers import Tokenizer, decoders

from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.workers.scheduling.plan import Grammar
from aerie.workers.structured_output.compiler import GrammarCompiler, Vocabulary
from aerie.workers.structured_output.mask_process.matcher import Matcher
from aerie.workers.structured_output.mask_process.trial import try_grammar
from aerie.workers.structured_output.token_bytes import BYTE_OF
from tests.support.structured_output.vocabularies import (
    END,
    KINDS,
    SENTENCES,
    byte_level,
    byte_level_without_some_bytes,
    saved,
    sentencepiece_unstripped,
    wordpiece,
)

CHARACTERS = sorted(set("".join(SENTENCES)))


@pytest.fixture(scope="module", params=KINDS, ids=lambda make: make.__name__)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    make: Callable[[], Tokenizer] = request.param
    return make()


def test_bytes_of_tokens_join_to_the_decoded_text(tokenizer: Tokenizer) -> None:
    """Random texts of known characters. Decoders differ at a text's start only: some drop its space."""
    edge, draw = ChatTokenizer(tokenizer, None, ()), random.Random(0)
    for _ in range(300):
        text = "".join(draw.choices(CHARACTERS, k=draw.randrange(1, 40)))
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        decoded = tokenizer.decode(tokens, skip_special_tokens=False)
        joined = b"".join(map(edge.token_bytes, tokens)).decode()
        assert joined in (decoded, " " + decoded), text
        detokenizer = edge.detokenizer(skip_special_tokens=False)
        assert "".join(map(detokenizer.step, tokens)) + detokenizer.flush() == decoded


def test_grammars_read_the_same_bytes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The logits have more rows than the tokenizer has tokens; special tokens have a text in structural tags alone."""
    edge = ChatTokenizer(tokenizer, None, ())
    vocabulary = Vocabulary(saved(tokenizer, tmp_path), edge.vocab_size + 5)
    every = [edge.token_bytes(token) for token in range(edge.vocab_size + 5)]
    in_tags = vocabulary.tokens((1,), True).decoded_vocab
    assert in_tags[: edge.vocab_size] == every[: edge.vocab_size]
    assert all(text[:1] == b"\xff" for text in in_tags[edge.vocab_size :]), "only named by id"
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    hidden = [b"" if token in special else raw for token, raw in enumerate(every)]
    assert vocabulary.tokens((1,), False).decoded_vocab == hidden


def test_parts_of_characters_are_bytes_not_replacement_characters() -> None:
    tokenizer = byte_level_without_some_bytes()
    edge = ChatTokenizer(tokenizer, None, ())
    letters = {tokenizer.token_to_id(letter): byte for letter, byte in BYTE_OF.items()}
    letters.pop(None, None)  # type: ignore[call-overload]
    assert 60 < len(letters) < 256
    assert all(edge.token_bytes(token) == bytes([byte]) for token, byte in letters.items())
    assert edge.token_bytes(tokenizer.token_to_id("<a call>")) == b"<a call>"


@pytest.mark.parametrize("make", [byte_level, byte_level_without_some_bytes])
def test_a_text_has_no_known_fewest_tokens_where_bytes_have_no_token(make: Callable[[], Tokenizer]) -> None:
    """Unknown bytes become one token however many they are, so a long text may have few tokens."""
    tokenizer = make()
    longest = ChatTokenizer(tokenizer, None, ()).longest_token_bytes
    assert (longest == 0) == (make is byte_level_without_some_bytes)
    if longest:
        assert len("\x01" * 1000) <= longest * len(tokenizer.encode("\x01" * 1000).ids)


def _answer(folder: Path, grammar: Grammar, draw: random.Random) -> bytes:
    """Return a random answer of allowed tokens, of the shorter half where it grows long."""
    vocabulary = Vocabulary(folder)
    texts = vocabulary.tokens(grammar.end_token_ids, False).decoded_vocab
    matcher = Matcher(GrammarCompiler(vocabulary).compile(grammar))
    words, answer = xgrammar.allocate_token_bitmask(1, vocabulary.size), b""
    while not matcher.is_terminated():
        matcher.fill(words)
        bits = np.unpackbits(words[0].numpy().view(np.uint8), bitorder="little")[: vocabulary.size]
        allowed = [int(token) for token in np.flatnonzero(bits)]
        ends = [token for token in allowed if token in grammar.end_token_ids]
        token = ends[0] if ends else draw.choice(allowed)
        assert matcher.take(token)
        answer += texts[token]
    return answer


@pytest.mark.parametrize("make", [byte_level_without_some_bytes, sentencepiece_unstripped])
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type":"object","properties":{"age":{"type":"integer"},"ok":{"type":"boolean"}}}'),
        ("choice", '["yes","no"]'),
        ("structural_tag", '{"type":"structural_tag","format":{"type":"plus","content":{"type":"token","token":40}}}'),
        ("regex", "[a-c]{3,9}ü?"),
    ],
)
def test_answers_of_every_form_with_every_vocabulary(
    make: Callable[[], Tokenizer], kind: str, text: str, tmp_path: Path
) -> None:
    tokenizer = make()
    folder = saved(tokenizer, tmp_path)
    grammar = Grammar(kind, text, (tokenizer.token_to_id(END),))  # type: ignore[arg-type]
    assert try_grammar(grammar, Vocabulary(folder)).fault == ""
    if kind != "structural_tag":
        answer = _answer(folder, grammar, random.Random(1)).decode()
        assert answer in ("yes", "no") if kind == "choice" else kind == "regex" or isinstance(json.loads(answer), dict)


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("choice", '["\x7f"]', "no text is allowed that"),
        ("choice", '["yes\x7f"]', "no text is allowed after 'yes' that the model's tokens can spell"),
        ("regex", "a[\x7f\x06]+", "no text is allowed after 'a' that the model's tokens can spell"),
    ],
)
def test_a_text_that_no_tokens_spell_is_refused_with_the_place(kind: str, text: str, said: str, tmp_path: Path) -> None:
    tokenizer = byte_level_without_some_bytes()
    grammar = Grammar(kind, text, (tokenizer.token_to_id(END),))  # type: ignore[arg-type]
    assert said in try_grammar(grammar, Vocabulary(saved(tokenizer, tmp_path))).fault


def test_a_vocabulary_of_words_spells_what_its_decoder_shows() -> None:
    tokenizer = wordpiece()
    tokens = tokenizer.encode("yes maybe", add_special_tokens=False).ids
    assert b"".join(map(ChatTokenizer(tokenizer, None, ()).token_bytes, tokens)) == b" yes maybe"


def test_a_tokenizer_without_a_decoder_joins_words_by_spaces() -> None:
    tokenizer = wordpiece()
    tokenizer.decoder = None
    token = tokenizer.token_to_id("a")
    assert ChatTokenizer(tokenizer, None, ()).token_bytes(token) == b" a"


def test_steps_in_a_sequence_in_a_sequence_are_read() -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()])])
    edge = ChatTokenizer(tokenizer, None, ())
    assert [edge.token_bytes(tokenizer.token_to_id(letter)) for letter in BYTE_OF] == [
        bytes([b]) for b in BYTE_OF.values()
    ]
