"""`aerie tekken`: texts become the tokens that ranks alone say, special tokens keep their ids, errors name the file."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.deploy.cli import main
from aerie.deploy.tekken import tekken_tokenizer

WORDS = [bytes([i]) for i in range(256)]
WORDS += [b"ab", b"bc", b"abc", b"aa", b"aaaa", b" a", "é".encode(), "日".encode()[:2], "日".encode(), b"bcbc", b" abc"]
BEYOND = [b"never"]  # past default_vocab_size
NUM_SPECIAL = 24
PATTERN = r" ?[^\s]+|\s+"
CONTENT: dict[str, Any] = {
    "config": {
        "pattern": PATTERN,
        "default_vocab_size": NUM_SPECIAL + len(WORDS),
        "default_num_special_tokens": NUM_SPECIAL,
        "version": "v3",
    },
    "vocab": [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
        for rank, word in enumerate([*WORDS, *BEYOND])
    ],
}
TOKENIZER = tekken_tokenizer(CONTENT, "x")


def by_ranks(piece: bytes) -> list[int]:
    """Byte-pair encoding as tiktoken has it: the pair of the lowest rank first, the leftmost of equal ones."""
    if piece in WORDS:
        return [NUM_SPECIAL + WORDS.index(piece)]
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while True:
        pairs = [left + right for left, right in zip(parts, parts[1:], strict=False)]
        ranks = [(WORDS.index(pair), at) for at, pair in enumerate(pairs) if pair in WORDS]
        if not ranks:
            return [NUM_SPECIAL + WORDS.index(part) for part in parts]
        _, at = min(ranks)
        parts[at : at + 2] = [pairs[at]]


@given(text=st.text(st.sampled_from("abcé日 \n") | st.characters(codec="utf-8", exclude_characters="[<"), max_size=24))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_texts_become_the_tokens_of_their_ranks(text: str) -> None:
    expected = [id for piece in re.findall(PATTERN, text) for id in by_ranks(piece.encode())]
    assert TOKENIZER.encode(text, add_special_tokens=False).ids == expected
    assert TOKENIZER.decode(expected) == text


def test_a_folder_with_only_tekken_json_names_the_command_and_is_served_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    (tmp_path / "tekken.json").write_text(json.dumps(CONTENT))
    with pytest.raises(ValueError, match=rf"tokenizer.json: missing; `aerie tekken {tmp_path}` writes it"):
        ChatTokenizer.from_folder(tmp_path)
    assert main(["tekken", str(tmp_path)]) == 0
    assert "chats need a chat_template.jinja" in capsys.readouterr().out
    tokenizer = ChatTokenizer.from_folder(tmp_path)
    assert tokenizer.eos_token_ids == (2,) and tokenizer.vocab_size == NUM_SPECIAL + len(WORDS)
    assert tokenizer.token_name(3) == "[INST]" and tokenizer.token_name(20) == "<SPECIAL_20>"
    assert TOKENIZER.encode("[INST]a").ids == [1, 3, NUM_SPECIAL + ord("a")]
    assert main(["tekken", str(tmp_path)]) == 2
    assert "tokenizer.json: is there already" in capsys.readouterr().err


def test_listed_special_tokens_have_their_ranks() -> None:
    listed = [{"rank": 1, "token_str": "<s>"}, {"rank": 7, "token_str": "[THINK]"}]
    tokenizer = tekken_tokenizer(CONTENT | {"special_tokens": listed}, "x")
    assert tokenizer.token_to_id("[THINK]") == 7 and tokenizer.id_to_token(3) == "<SPECIAL_3>"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"config": {}, "vocab": 3}'])
def test_what_is_no_tekken_json_is_refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tekken.json").write_text(text)
    assert main(["tekken", str(tmp_path)]) == 2
    assert f"{tmp_path / 'tekken.json'}: " in capsys.readouterr().err
    assert not (tmp_path / "tokenizer.json").exists()
