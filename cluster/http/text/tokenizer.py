"""A model's tokenizer and chat template for the HTTP API, with the Rust tokenizer and Jinja only.

transformers' own loader imports torch: 240-330 MB and 2-3 s per ingress instead of 24 MB and 0.1 s. Files read from the
model's folder: tokenizer.json, tokenizer_config.json, special_tokens_map.json, generation_config.json,
config.json, chat_template.jinja.
"""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from aerie.cluster.http.text import harmony_prompt, model_files, user_text
from aerie.cluster.http.text.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    SlowTemplateError,
    up_to_end,
    with_end,
)
from aerie.cluster.http.text.detokenizer import ByteLevelDetokenizer, Detokenizer, PrefixDetokenizer
from aerie.cluster.http.text.harmony_prompt import HarmonyPrompt
from aerie.cluster.http.text.template_facts import Efforts
from aerie.cluster.http.text.user_text import ChatText, ControlTokens, TooManyTokensError, Truncation, marked, unmarked
from aerie.cluster.linux import trim_heap
from aerie.workers.structured_output.token_bytes import BYTE_OF, TokenBytes, read_json, read_tokenizer

LONG_TEXT = 4096  # characters, about 1 ms of encoding: longer texts are encoded in a thread
MAX_LONG_ENCODES = 2  # long texts that are encoded at the same time
MANY_MESSAGES = 32  # messages that are rendered in a thread; fewer take a millisecond
QUICK_RENDER_S = 0.05  # maximum time of a template in the event loop, after which it starts again in a thread
TOKENS_BEFORE = 5  # tokens of the prompt that a PrefixDetokenizer sees
ChatPrompt = ChatTemplate | HarmonyPrompt
T = TypeVar("T")


class ChatTokenizer:
    """Converts texts and messages to tokens and back. template: None refuses chats, for models without a template.

    tool_template: template for chats with tools; None: `template`.
    eos_token_ids: tokens that end an answer.
    response_template: transformers' template for parsing answers; None without one.
    class_name: transformers' name for the tokenizer.
    sampling_defaults: sampling parameters of the model's generation_config.json, by name.
    vocab_size: number of the tokenizer's ids.
    num_ids: number of the model's, which may have more rows.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatPrompt | None,
        eos_token_ids: tuple[int, ...],
        response_template: Mapping[str, Any] | None = None,
        class_name: str | None = None,
        sampling_defaults: Mapping[str, float] | None = None,
        tool_template: ChatPrompt | None = None,
        num_model_ids: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._tool_template = tool_template or template
        self.eos_token_ids = eos_token_ids
        self.response_template = response_template
        self.class_name = class_name
        self.sampling_defaults = dict(sampling_defaults or {})
        added = tokenizer.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._special = frozenset(token for token, content in added.items() if content.special)
        self._controls = ControlTokens(tokenizer)
        # Its own threads, and no semaphore, which would belong to one event loop: `aerie.LLM` has several.
        self._long_encodes = ThreadPoolExecutor(MAX_LONG_ENCODES, "tokenizer")
        self._hidden_ids: dict[tuple[str, ...], frozenset[int]] = {(): self._special}
        self._bytes = TokenBytes(tokenizer)
        self.vocab_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.num_ids = max(self.vocab_size, num_model_ids)

    @classmethod
    def from_folder(
        cls, folder: str | Path, template_text: str | None = None, template_file: str = ""
    ) -> "ChatTokenizer":
        """Load a model folder. template_text, template_file: a chat template instead of the folder's. Raises ValueError
        with the file and the remedy."""
        path = Path(folder)
        config = read_json(path / "tokenizer_config.json")
        tokenizer = read_tokenizer(path)
        special = model_files.special_tokens(config, read_json(path / "special_tokens_map.json"))
        if template_file:
            template_text = model_files.read_text(Path(template_file))
        overrides = None if template_text is None else {"default": template_text}
        sources = overrides or model_files.template_sources(path, config)
        templates = {name: _chat_prompt(sources[name], special) for name in sources if name in ("default", "tool_use")}
        template = templates.get("default")
        generation = path / "generation_config.json"
        eos = model_files.eos_ids(generation) or model_files.eos_ids(path / "config.json")
        own = tokenizer.token_to_id(special.get("eos_token", ""))
        eos_ids = dict.fromkeys([*eos, *([] if own is None else [own])])
        if isinstance(template, HarmonyPrompt):
            ends = map(tokenizer.token_to_id, harmony_prompt.STOPS)
            eos_ids |= dict.fromkeys(token for token in ends if token is not None)
        answers = model_files.response_template(config)
        defaults = model_files.sampling_defaults(generation)
        class_name = config.get("tokenizer_class")
        num_ids, tools = model_files.num_model_ids(path / "config.json"), templates.get("tool_use")
        return cls(tokenizer, template, tuple(eos_ids), answers, class_name, defaults, tools, num_ids)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Return the special tokens that a chat template may use, by name: "eos_token" -> "</s>"."""
        return {} if self._tool_template is None else dict(self._tool_template.special_tokens)

    @property
    def template_source(self) -> str:
        """Return the text of the chat template, of that for tools if there are two; "" without one."""
        return "" if self._tool_template is None else self._tool_template.source

    @property
    def efforts(self) -> Efforts:
        """Return the chat template's variables for each `reasoning_effort` that has an effect."""
        return {} if self._tool_template is None else self._tool_template.efforts

    @property
    def shows_tools(self) -> bool:
        """Return whether the chat template shows tools to the model."""
        return self._tool_template is not None and self._tool_template.shows_tools

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        limit_s: float | None = None,
        continued: bool = False,
    ) -> ChatText:
        """Render messages with the chat template within `limit_s` (None: its own limit). continued: end with the last
        message's text. Raises ChatTemplateError."""
        template = self._tool_template if tools else self._template
        if template is None:
            raise ChatTemplateError(
                "the model has no chat template: use /v1/completions, or add chat_template.jinja to the model's folder"
                if self._tool_template is None
                else "the model has a chat template for chats with tools only; add chat_template.jinja to its folder"
            )
        try:
            turns, (named, shown), mark = marked(messages, (variables or {}, list(tools)), *self._controls.texts)
        except ValueError as error:
            raise ChatTemplateError(str(error)) from None
        if continued:
            turns = with_end(turns)
        text = template.render(turns, add_generation_prompt, named, shown, limit_s)
        return unmarked(up_to_end(text) if continued else text, mark)

    async def rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        continued: bool = False,
    ) -> ChatText:
        """Do `render`; long work runs in a thread."""
        num_chars = sum(len(value) for message in messages for value in message.values() if isinstance(value, str))
        if len(messages) < MANY_MESSAGES and num_chars < LONG_TEXT * MANY_MESSAGES:
            with contextlib.suppress(SlowTemplateError):
                return self.render(messages, add_generation_prompt, variables, tools, QUICK_RENDER_S, continued)
        arguments = messages, add_generation_prompt, variables, tools, None, continued
        return await asyncio.to_thread(self.render, *arguments)

    async def encode(
        self,
        text: str | ChatText,
        add_special_tokens: bool,
        max_tokens: int | None = None,
        truncation: Truncation | None = None,
    ) -> list[int]:
        """Return token ids. All control tokens are recognised in a plain text, and only those of the template in a
        chat.

        max_tokens: raise TooManyTokensError for a text with more than twice as many, before it is encoded whole.
        truncation: return these tokens, and perhaps a few more; the text may have any length.

        Long texts are encoded in threads, two at a time, because each takes hundreds of bytes per token meanwhile.
        """
        chat = text if isinstance(text, ChatText) else ChatText(text)
        if len(chat) < LONG_TEXT:
            return self._encode(chat, add_special_tokens)
        return await self._in_thread(self._encode_long, chat, add_special_tokens, max_tokens, truncation)

    async def decode_long(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Do `decode`; many tokens are decoded in a thread."""
        if len(tokens) < LONG_TEXT:
            return self.decode(tokens, skip_special_tokens)
        return await self._in_thread(self._decode_long, tokens, skip_special_tokens)

    @functools.cached_property
    def longest_token_bytes(self) -> int:
        """Return the maximum bytes of text per token; 0 if unknown, because the tokenizer changes text (normalizes it,
        or has no token for some bytes)."""
        if not self._bytes.is_byte_level or self._tokenizer.normalizer is not None:
            return 0
        words = self._tokenizer.get_vocab(with_added_tokens=False)
        if not words.keys() >= BYTE_OF.keys():
            return 0
        plain = max(map(len, words))  # a character for each byte
        added = (len(token.content.encode()) for token in self._tokenizer.get_added_tokens_decoder().values())
        return max(plain, *added, 1)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def detokenizer(
        self, skip_special_tokens: bool, before: Sequence[int] = (), shown: tuple[str, ...] | None = ()
    ) -> Detokenizer:
        """Return the detokenizer of one answer.

        before: the prompt, if the answer continues its text (not in a chat).
        shown: special tokens that are part of the text; None: all."""
        hidden = self._hidden(shown) if skip_special_tokens else frozenset()
        if self._bytes.is_byte_level:
            return ByteLevelDetokenizer(self._bytes, hidden)
        return PrefixDetokenizer(self._tokenizer, hidden, before[-TOKENS_BEFORE:])

    def added_ids(self, texts: Sequence[str]) -> dict[int, str]:
        """Return the added tokens among `texts`, by their ids."""
        ids = ((self._tokenizer.token_to_id(text), text) for text in texts)
        return {token: text for token, text in ids if token in self._added}

    def _hidden(self, shown: tuple[str, ...] | None) -> frozenset[int]:
        """Return the special tokens except those shown."""
        if shown is None:
            return frozenset()
        if shown not in self._hidden_ids:
            self._hidden_ids[shown] = self._special - {self._tokenizer.token_to_id(text) for text in shown}
        return self._hidden_ids[shown]

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token in the middle of a text; possibly a part of a character."""
        return self._bytes.of(token)

    def token_text(self, token: int) -> str:
        """Return the text of `token_bytes`, with incomplete characters as U+FFFD."""
        return self.token_bytes(token).decode(errors="replace")

    def token_name(self, token: int) -> str:
        """Return a token's entry in the vocabulary, "" without one."""
        return self._tokenizer.id_to_token(token) or ""

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._long_encodes, work, *arguments)

    def _encode_long(
        self, chat: ChatText, add_special_tokens: bool, max_tokens: int | None, truncation: Truncation | None
    ) -> list[int]:
        """Do `encode`, perhaps of a part of the text, and give freed memory back after a long one."""
        try:
            if truncation is not None:
                chat = chat.part(*truncation.part(self._num_tokens, chat.text))
            elif (
                max_tokens is not None
                and len(chat) > max(user_text.PIECE_CHARS, max_tokens)
                and user_text.exceeds(self._num_tokens, chat.text, 2 * max_tokens)
            ):
                raise TooManyTokensError(2 * max_tokens)
            return self._encode(chat, add_special_tokens)
        finally:
            if len(chat) > user_text.PIECE_CHARS:
                trim_heap()

    def _decode_long(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        """Do `decode`, which holds the interpreter's lock throughout (tokenizers 0.23: 2.4 s for two million
        tokens)."""
        try:
            # A batch holds the lock only while it copies ids: 60 ms of 2 s for a million.
            if not self._bytes.is_byte_level:
                return str(self._tokenizer.decode_batch([list(tokens)], skip_special_tokens=skip_special_tokens)[0])
            hidden, bytes_of = self._special if skip_special_tokens else frozenset(), self._bytes.of
            return b"".join([bytes_of(token) for token in tokens if token not in hidden]).decode(errors="replace")
        finally:
            if len(tokens) > user_text.PIECE_CHARS:
                trim_heap()

    def _num_tokens(self, text: str) -> int:
        return len(self._encode(ChatText(text), False))

    def _encode(self, chat: ChatText, add_special_tokens: bool) -> list[int]:
        if chat.marks:
            return self._controls.encode(chat, add_special_tokens)
        # tokenizers 0.23: `encode` holds the interpreter's lock throughout (2 MB of text: 4.3 s on a 2.1 GHz
        # Xeon); this one releases it, leaves out the unused offsets, and takes 0.6 s.
        encodings = self._tokenizer.encode_batch_fast([chat.text], add_special_tokens=add_special_tokens)
        ids: list[int] = encodings[0].ids
        return ids


def _chat_prompt(source: str, special: Mapping[str, str]) -> ChatPrompt:
    """Return the renderer of a model's chats."""
    return HarmonyPrompt(source, special) if harmony_prompt.is_harmony(source) else ChatTemplate(source, special)
