"""Reads a model folder's tokenizer, and the bytes that each of its tokens stands for, from its decoder: for the HTTP
API, log-probabilities and grammars alike. Tokens of a vocabulary need not cover all bytes. Plain `tokenizers`, no
torch."""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_PLAIN_STEPS = frozenset({"ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip"})


class TokenBytes:
    """The bytes that a token has in the middle of a text, computed at its first use. Decoded alone, most of
    SentencePiece's tokens would lose the space before them, and parts of characters would become U+FFFD.

    is_byte_level: whether a text is the concatenation of its tokens' bytes, read as UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        steps = list(_decoder_steps(tokenizer))
        kinds = [step["type"] for step in steps]
        self._has_byte_tokens = "ByteFallback" in kinds
        self._has_letters = "ByteLevel" in kinds
        self._replaced = [(step["pattern"]["String"], step["content"]) for step in steps if _replaces_text(step)]
        self._replaced += [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]
        self._is_plain = bool(steps) and all(_is_plain(step, kinds[:i]) for i, step in enumerate(steps))
        self.is_byte_level = self._has_letters and self._is_plain and not {"Strip", "Metaspace"} & set(kinds)

    def of(self, token: int) -> bytes:
        """Return the bytes; b"" for ids outside the vocabulary, because embeddings are often padded."""
        raw = self._bytes.get(token)
        if raw is None:
            name = self._tokenizer.id_to_token(token)
            raw = self._bytes[token] = self._named_bytes(name, token) if name else b""
        return raw

    def _named_bytes(self, name: str, token: int) -> bytes:
        """Return the bytes of a token from its name in the vocabulary."""
        byte = _BYTE_TOKEN.fullmatch(name) if self._has_byte_tokens else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        if not (self._is_plain or self._has_letters):
            return self._differing_bytes(token)
        for text, content in self._replaced:
            name = name.replace(text, content)
        return _bytes_of_letters(name) if self._has_letters else name.encode()

    def _differing_bytes(self, token: int) -> bytes:
        """Return what a second token adds to a text of one: for decoders that treat the first token differently."""
        alone, twice = self._decode([token]), self._decode([token, token])
        return (twice[len(alone) :] if twice.startswith(alone) else alone).encode()

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


def _decoder_steps(tokenizer: Tokenizer) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of the decoder in their order; none without a decoder."""
    pending = [json.loads(tokenizer.decoder.__getstate__())] if tokenizer.decoder is not None else []
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending[:0] = step["decoders"]
        else:
            yield step


def _replaces_text(step: Mapping[str, Any]) -> bool:
    return step["type"] == "Replace" and "String" in step["pattern"]


def _is_plain(step: Mapping[str, Any], before: list[str]) -> bool:
    """Return whether `TokenBytes` applies a step itself: one that treats a token without regard to its neighbours, or
    the ends of a whole text. before: the types of the steps before it."""
    kind, is_joined = step["type"], "Fuse" in before or "ByteLevel" in before
    if kind == "Strip":
        return is_joined
    return kind in _PLAIN_STEPS and (kind != "Replace" or (_replaces_text(step) and "ByteLevel" not in before))


def _bytes_of_letters(text: str) -> bytes:
    """Return the bytes of a token's printable form, like the byte-level decoder of `tokenizers`: a token with a
    character outside the alphabet, such as an added token with a space, stands for itself."""
    raw = bytearray()
    for character in text:
        byte = BYTE_OF.get(character)
        if byte is None:
            return text.encode()
        raw.append(byte)
    return bytes(raw)


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable characters for the 256 bytes: printable bytes are unchanged, others map to U+0100
    onwards (Radford et al. 2019, `bytes_to_unicode` of the released encoder)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


logger = logging.getLogger(__name__)

_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_json(path: Path) -> dict[str, Any]:
    """Return a file's JSON; {} without the file. Raises ValueError."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold a JSON object; download it again")
    return content


def read_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of tokenizer.json, with the tokens that only tokenizer_config.json has, as transformers
    adds them. Raises ValueError."""
    file = folder / "tokenizer.json"
    if not file.is_file() and (folder / "tekken.json").is_file():
        raise ValueError(f"{file}: missing; `aerie tekken {folder}` writes it from the tekken.json beside it")
    if not file.is_file():
        raise ValueError(f"{file}: missing; save the tokenizer in the fast format (transformers' save_pretrained)")
    try:
        tokenizer = Tokenizer.from_file(str(file))
        num_tokens = tokenizer.get_vocab_size(with_added_tokens=True)
    except Exception as error:  # the library raises `Exception` itself (tokenizers 0.23)
        raise ValueError(f"{file}: is no tokenizer ({error}); download it again") from None
    if num_tokens == 0:
        raise ValueError(f"{file}: has no tokens; download it again")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    settings = folder / "tokenizer_config.json"
    _add_tokens(tokenizer, read_json(settings).get("added_tokens_decoder"), settings)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, declared: Any, file: Path) -> None:
    """Add tokens of tokenizer_config.json that the tokenizer lacks, in the order of their ids. A token that would get
    another id stays text, because the model would read another token."""
    entries = declared if isinstance(declared, dict) else {}
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for token_id in sorted((key for key in entries if key.isdecimal()), key=int):
        fields = entries[token_id]
        content = fields.get("content") if isinstance(fields, dict) else None
        if not isinstance(content, str) or content in known:
            continue
        own = tokenizer.token_to_id(content)
        next_id = tokenizer.get_vocab_size(with_added_tokens=True) if own is None else own
        if next_id == int(token_id):
            flags = {name: fields[name] for name in _TOKEN_FLAGS if isinstance(fields.get(name), bool)}
            tokenizer.add_tokens([AddedToken(content, **flags)])
        else:
            logger.warning("%s: token %r has id %s, but %d in tokenizer.json", file, content, token_id, next_id)
