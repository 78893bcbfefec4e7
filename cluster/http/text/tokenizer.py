"""A model's tokenizer and chat template, as the HTTP edge uses them; Rust tokenizer and Jinja only.

transformers' own loader imports torch: 240-330 MB and 2-3 s per ingress against 24 MB and 0.1 s here. What is read from
the model's folder: tokenizer.json, tokenizer_config.json, special_tokens_map.json, generation_config.json,
config.json, chat_template.jinja.
"""

import asyncio
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders

from cluster.http.text.chat_template import ChatTemplate, ChatTemplateError
from cluster.http.text.detokenizer import ByteLevelDetokenizer, ByteVocabulary, Detokenizer, PrefixDetokenizer

LONG_TEXT = 4096  # characters, about 1 ms of encoding: longer texts are encoded in a thread
MAX_LONG_ENCODES = 2
TOKENS_BEFORE = 5  # of the prompt, seen by a PrefixDetokenizer
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTokenizer:
    """Texts and messages to tokens and back. template None: the model has none, and chat is refused.

    eos_token_ids: tokens that end an answer.
    response_template: how the model's answers are to be read, as transformers has it; None: the model does not say.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        eos_token_ids: tuple[int, ...],
        response_template: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self.eos_token_ids = eos_token_ids
        self.response_template = response_template
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, content in added.items() if content.special)
        self._long_encodes = asyncio.Semaphore(MAX_LONG_ENCODES)
        self._hidden_beside: dict[tuple[str, ...], frozenset[int]] = {(): self._special}
        self._bytes = ByteVocabulary(tokenizer) if _is_byte_level(tokenizer) else None
        self.vocab_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ChatTokenizer":
        """Raises ValueError with the file and the remedy."""
        path = Path(folder)
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"{file}: missing; save the tokenizer in the fast format (transformers' save_pretrained)")
        tokenizer = _read_tokenizer(file)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        config = _read_json(path / "tokenizer_config.json")
        special = _special_tokens(config, _read_json(path / "special_tokens_map.json"))
        source = _template_source(path, config)
        template = None if source is None else ChatTemplate(source, special)
        eos = _eos_ids(path / "generation_config.json") or _eos_ids(path / "config.json")
        own = tokenizer.token_to_id(special.get("eos_token", ""))
        eos_ids = dict.fromkeys([*eos, *([] if own is None else [own])])
        return cls(tokenizer, template, tuple(eos_ids), _response_template(config))

    @property
    def special_tokens(self) -> dict[str, str]:
        """By name, "eos_token" -> "</s>"; those that the chat template may use."""
        return {} if self._template is None else dict(self._template.special_tokens)

    @property
    def template_source(self) -> str:
        """The chat template's text; "" without one."""
        return "" if self._template is None else self._template.source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Messages through the chat template. Raises ChatTemplateError."""
        if self._template is None:
            raise ChatTemplateError(
                "the model has no chat template: use /v1/completions, or add chat_template.jinja to the model's folder"
            )
        return self._template.render(messages, add_generation_prompt, variables, tools)

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids. Long texts are encoded in a thread, beside which the event loop goes on, two at a time: each takes
        a hundred times its size while it is worked on."""
        if len(text) < LONG_TEXT:
            return self._encode(text, add_special_tokens)
        async with self._long_encodes:
            return await asyncio.to_thread(self._encode, text, add_special_tokens)

    @functools.cached_property
    def longest_token_bytes(self) -> int:
        """Bytes of text that one token stands for, at most; 0 where that cannot be known, because the tokenizer changes
        text (normalizes it, or has one token for all that it does not know)."""
        if self._bytes is None or self._tokenizer.normalizer is not None:
            return 0
        plain = max(map(len, self._tokenizer.get_vocab(with_added_tokens=False)))  # a character for each byte
        added = (len(token.content.encode()) for token in self._tokenizer.get_added_tokens_decoder().values())
        return max(plain, *added, 1)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def detokenizer(
        self, skip_special_tokens: bool, before: Sequence[int] = (), shown: tuple[str, ...] | None = ()
    ) -> Detokenizer:
        """For one answer. before: the prompt, if the answer continues its text (not in a chat). shown: special tokens
        that are in the text anyway; None: all."""
        hidden = self._hidden(shown) if skip_special_tokens else frozenset()
        if self._bytes is not None:
            return ByteLevelDetokenizer(self._bytes, hidden)
        return PrefixDetokenizer(self._tokenizer, hidden, before[-TOKENS_BEFORE:])

    def _hidden(self, shown: tuple[str, ...] | None) -> frozenset[int]:
        """Special tokens but those shown."""
        if shown is None:
            return frozenset()
        if shown not in self._hidden_beside:
            self._hidden_beside[shown] = self._special - {self._tokenizer.token_to_id(text) for text in shown}
        return self._hidden_beside[shown]

    def token_bytes(self, token: int) -> bytes:
        """What one token stands for by itself, possibly a part of a character."""
        if self._bytes is not None:
            return self._bytes.of(token)
        return self.decode([token]).encode()

    def token_name(self, token: int) -> str:
        """The vocabulary's entry of a token, "" if there is none."""
        return self._tokenizer.id_to_token(token) or ""

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Of tokenizers 0.23's ways, `encode` holds the interpreter's lock throughout (2 MB of text: 4.3 s on a 2.1 GHz
        # Xeon); this one releases it, leaves out the offsets that nobody reads, and takes 0.6 s.
        encodings = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encodings[0].ids
        return ids


def _read_tokenizer(file: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(file))
        num_tokens = tokenizer.get_vocab_size(with_added_tokens=True)
    except Exception as error:  # the library raises `Exception` itself (tokenizers 0.23)
        raise ValueError(f"{file}: is no tokenizer ({error}); download it again") from None
    if num_tokens == 0:
        raise ValueError(f"{file}: has no tokens; download it again")
    return tokenizer


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    decoder = tokenizer.decoder
    if isinstance(decoder, decoders.ByteLevel):
        return True
    if not isinstance(decoder, decoders.Sequence):
        return False
    steps = json.loads(decoder.__getstate__())["decoders"]
    return [step["type"] for step in steps] == ["ByteLevel"]


def _read_json(path: Path) -> dict[str, Any]:
    """{} where the file is missing. Raises ValueError."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold a JSON object; download it again")
    return content


def _special_tokens(config: Mapping[str, Any], saved_map: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens; tokenizer_config.json goes before the older special_tokens_map.json."""
    tokens = {}
    for name in SPECIAL_NAMES:
        value = config.get(name) or saved_map.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(f"{file}: is no text ({error}); download it again") from None
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates
        named = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
        source = named[0].get("template") if named else None
    return source if isinstance(source, str) else None


def _response_template(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Raises ValueError for one that this version of transformers cannot read."""
    template = config.get("response_template")
    if template is None:
        return None
    from transformers.utils.chat_parsing.response_templates import load_response_template

    try:
        load_response_template(template)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"tokenizer_config.json: response_template: {error}; correct or remove it, and choose "
            "ingress.output_parser yourself"
        ) from None
    return dict(template)


def _eos_ids(path: Path) -> list[int]:
    """Of generation_config.json or config.json. Raises ValueError for what is no token id."""
    value = _read_json(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(each) is int for each in ids):
        raise ValueError(f"{path}: eos_token_id={value!r}: must be a token id, or a list of token ids")
    return ids
