"""Prompts of all forms as texts and token ids, and `LoRARequest`, which names a prompt's LoRA adapter as vLLM's class
does."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypedDict, TypeVar

import torch

from aerie.cluster.http.config import EdgeConfig
from aerie.cluster.http.errors import ApiError, unsupported
from aerie.cluster.http.requests.image_prompt import encode_chat, images_of
from aerie.cluster.http.requests.image_reader import ImageReader
from aerie.cluster.http.requests.prompts import PLACEHOLDER, chat_text, check_token_ids, encode_prompt
from aerie.cluster.http.requests.tools import functions, template_variables
from aerie.cluster.http.schema.body import checked_body
from aerie.cluster.http.schema.request import ChatCompletionRequest
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.cluster.http.text.user_text import ChatText, Truncation
from aerie.workers.prompt_inputs import Embeddings, PreparedImage, PromptInputs

T = TypeVar("T")
Messages = Sequence[Mapping[str, Any]]


class TextPrompt(TypedDict, total=False):
    """A prompt's text. cache_salt: see `SamplingParams`."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt's token ids. prompt: their text, for the output."""

    prompt_token_ids: Sequence[int]
    prompt: str
    cache_salt: str


class EmbedsPrompt(TypedDict):
    """A prompt's embeddings: a tensor or an array [tokens, hidden_size]."""

    prompt_embeds: Any


@dataclass(frozen=True)
class Prompt:
    """A prompt. text: to encode if `tokens` is None, else only for the output. images: of the chat. embeds: in the
    place of `tokens`."""

    text: str | None
    tokens: list[int] | None = None
    cache_salt: str | None = None
    chat: ChatText | None = None
    images: tuple[PreparedImage, ...] = ()
    embeds: PromptInputs | None = None

    async def encoded(
        self, tokenizer: ChatTokenizer, limits: EdgeConfig, truncation: Truncation | None
    ) -> tuple[list[int], PromptInputs | None]:
        """Return the token ids and other inputs. truncation: only this part of the tokens. Raises ApiError."""
        if truncation is not None and (self.images or self.embeds is not None):
            raise unsupported("truncate_prompt_tokens", "with images or embeddings the prompt is whole")
        if self.chat is not None:
            tokens, inputs = await encode_chat(self.chat, self.images, tokenizer, limits, truncation, param="prompt")
            return tokens if truncation is None else truncation.of(tokens), inputs
        if self.tokens is not None:
            tokens = check_token_ids("prompt_token_ids", self.tokens, tokenizer)
        else:
            assert self.text is not None
            tokens = await encode_prompt(self.text, True, "prompt", tokenizer, limits, truncation)
        return tokens if truncation is None else truncation.of(tokens), self.embeds


def prompt_of(prompt: Any) -> Prompt:
    """Return a prompt of `LLM.generate`. Raises TypeError."""
    if isinstance(prompt, str):
        return Prompt(prompt)
    if isinstance(prompt, Mapping):
        if other := [key for key, value in prompt.items() if key not in _KEYS and value is not None]:
            raise TypeError(f"prompt[{other[0]!r}]: is not supported: prompts are texts, token ids or embeddings")
        if prompt.get("prompt_embeds") is not None:
            embeds = _embeddings(prompt["prompt_embeds"])
            tokens = [PLACEHOLDER] * embeds.num_rows
            return Prompt(None, tokens, prompt.get("cache_salt"), embeds=PromptInputs((embeds,)))
        if "prompt_token_ids" in prompt:
            tokens = [int(token) for token in prompt["prompt_token_ids"]]
            return Prompt(prompt.get("prompt"), tokens, prompt.get("cache_salt"))
        if isinstance(prompt.get("prompt"), str):
            return Prompt(prompt["prompt"], None, prompt.get("cache_salt"))
    elif is_token_ids(prompt):
        return Prompt(None, [int(token) for token in prompt])
    raise TypeError(
        f'prompt {prompt!r:.80}: must be a text, a list of token ids, {{"prompt": text}} or {{"prompt_token_ids": ids}}'
    )


def _embeddings(value: Any) -> Embeddings:
    """Return a prompt's embeddings. Raises ValueError."""
    try:
        rows = torch.as_tensor(value).detach().float().cpu()
    except (TypeError, ValueError, RuntimeError):
        rows = torch.empty(0)
    if rows.dim() != 2 or rows.numel() == 0:
        raise ValueError("prompt_embeds: must be a tensor [tokens, hidden_size] of numbers, of at least one token")
    return Embeddings.of(0, rows.numpy())


def is_token_ids(value: Any) -> bool:
    """Whether this is a list of token ids, which is one prompt."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and bool(value)
    return is_list and all(isinstance(token, Integral) and not isinstance(token, bool) for token in value)


async def chat_prompt(
    messages: Messages,
    tokenizer: ChatTokenizer,
    images: ImageReader,
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
) -> Prompt:
    """Render a conversation with the chat template, as the HTTP API does. images: prepares its images. Raises
    ValueError, and TypeError for what is no conversation."""
    for message in [messages] if isinstance(messages, str) else messages:
        if not isinstance(message, Mapping):
            raise TypeError(f'messages: {message!r:.80} must be a mapping such as {{"role": "user", "content": text}}')
    values = {
        "messages": [dict(message) for message in messages],
        "tools": None if tools is None else [dict(tool) for tool in tools],
        "chat_template_kwargs": None if variables is None else dict(variables),
    }
    try:
        body, _ = checked_body(values, ChatCompletionRequest, strict=False)
        await images.read(body.messages)
        text = await chat_text(
            body.messages,
            tokenizer,
            add_generation_prompt,
            template_variables(body, tokenizer),
            functions(body.tools),
            continue_final_message,
        )
    except ApiError as error:
        raise ValueError(error.message) from None
    return Prompt(text.text, chat=text, images=tuple(images_of(body.messages)))


def run_coroutine(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine, from any thread, also one whose event loop runs (a notebook's)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds", "cache_salt")


@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter, in a folder as peft saves it. Equal names are the same adapter, unless the path differs.

    lora_int_id: as in vLLM; not used.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
