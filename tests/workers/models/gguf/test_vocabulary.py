"""Tokenizers of GGUF files against the algorithms that they are for, and the files beside them."""

from typing import Any

import pytest
from tokenizers import Tokenizer

from aerie.workers.models.gguf.vocabulary import Vocabulary

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
PIECES = ["▁", "a", "b", "n", "▁a", "an", "ana", "ba", "▁ba", "nan", "▁b", "ban"]


def sentencepiece(**changes: Any) -> dict[str, Any]:
    """A file's metadata: special tokens, 256 bytes, two user-defined runs of spaces, and pieces in random order."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "  ", "    ", "<tag>", *PIECES]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, USER, USER, USER, *[NORMAL] * len(PIECES)]
    scores = [0.0] * 259 + [-1000.0] * 3 + [-float(i * 7 % 13) for i in range(len(PIECES))]
    keys = {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores, "unknown_token_id": 0}
    keys |= {"bos_token_id": 1, "eos_token_id": 2, "add_space_prefix": False} | changes
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def made(metadata: dict[str, Any]) -> Tokenizer:
    return Vocabulary(metadata, "x.gguf").tokenizer()


def merged(text: str, metadata: dict[str, Any]) -> list[str]:
    """SentencePiece's BPE: the two neighbours that make the piece of the highest score, the first of these, merge."""
    scores = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True))
    pieces = list(text.replace(" ", "▁"))
    while True:
        pairs = [(-scores[pieces[i] + pieces[i + 1]], i) for i in range(len(pieces) - 1)
                 if pieces[i] + pieces[i + 1] in PIECES]  # fmt: skip
        if not pairs:
            return pieces
        i = min(pairs)[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


def test_pieces_merge_by_score_as_in_sentencepiece() -> None:
    metadata = sentencepiece()
    for text in ("banana", "a banana ban", "nanan anab", "ab an bananab nanana"):
        assert made(metadata).encode(text).tokens == ["<s>", *merged(text, metadata)]


def test_user_defined_tokens_come_first_and_unknown_letters_are_bytes() -> None:
    tokens = made(sentencepiece()).encode("a     b<tag>é").tokens
    assert tokens == ["<s>", "a", "    ", "▁b", "<tag>", "<0xC3>", "<0xA9>"]
    tokenizer = made(sentencepiece(add_space_prefix=True, add_bos_token=False, add_eos_token=True))
    encoding = tokenizer.encode("ban é")
    assert encoding.tokens[0].startswith("▁b") and encoding.tokens[-1] == "</s>"
    assert tokenizer.decode(encoding.ids) == "ban é"


def test_ends_of_turns_chat_templates_and_sampling_defaults_are_read() -> None:
    metadata = sentencepiece(eot_token_id=261) | {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    metadata |= {"tokenizer.chat_template": "{{ messages }}", "tokenizer.chat_templates": ["tool_use"]}
    metadata |= {"tokenizer.chat_template.tool_use": "{{ tools }}"}
    metadata["tokenizer.ggml.tokens"][0] = "<end_of_turn>"
    metadata["tokenizer.ggml.token_type"][0] = CONTROL
    vocabulary = Vocabulary(metadata, "x.gguf")
    files = vocabulary.config_files()
    assert files["generation_config.json"] == {
        "eos_token_id": [2, 261, 0],
        "bos_token_id": 1,
        "temperature": 0.5,
        "top_k": 20,
    }
    assert files["chat_template.jinja"] == "{{ messages }}"
    assert files["additional_chat_templates/tool_use.jinja"] == "{{ tools }}"
    assert files["tokenizer_config.json"]["eos_token"] == "</s>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": "t5"},
            r"x\.gguf: a tokenizer of the kind t5 is not supported, only gpt2 and llama; give",
        ),
        (
            {"model": "gpt2", "pre": "poro-chat"},
            r"tokenizer\.ggml\.pre='poro-chat' is not supported; supported",
        ),
        ({"token_type": [1]}, "has no complete list of tokens; give a tokenizer's folder by --tokenizer"),
        ({"tokens": []}, "has no complete list of tokens"),
    ],
)
def test_unsupported_tokenizers_are_refused_with_the_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(sentencepiece(**changes))
