"""Offline generation: an engine in this process, without Ray and HTTP, with the interface of vLLM's `LLM`. Users import
it as `aerie.LLM`.

Several ranks run in separate processes, started by `multiprocessing`; a script then needs the usual
`if __name__ == "__main__":`.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from cluster.assembly import engine_spec
from cluster.config import ConfigError, read_args
from cluster.http.text.tokenizer import ChatTokenizer
from cluster.http.text.user_text import ChatText
from deploy.checks import checked
from deploy.config import vllm_options
from deploy.config.files import find_config
from deploy.config.model import model_args, names_model, use_options
from deploy.config.vllm_values import OptionError
from deploy.offline_requests import (
    CompletionOutput,
    Logprob,
    RequestOutput,
    RunningAnswer,
    SamplingParams,
    is_token_ids,
    prompt_of,
)
from speculative.build import local_engine
from workers.scheduling.request import RequestOutput as StepOutput

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams"]

GREEDY = SamplingParams(max_tokens=256, temperature=0.0)
Params = SamplingParams | Sequence[SamplingParams] | None
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """An engine that answers lists of prompts. Use it in a `with` statement, or `close` it, because ranks may be
    processes."""

    def __init__(
        self, model: str | Path = "eagle", *, draft: str | None = None, revision: str | None = None, **options: Any
    ) -> None:
        """model: a folder with a checkpoint, a name on the hub, a Serve config file, or the name of a packaged one.
        draft: an EAGLE head's folder or hub name, or "suffix"; only with a model.
        revision: branch, tag or commit of the model on the hub.
        options: keyword arguments of vLLM's `LLM` that docs/coming-from-vllm.md lists, such as tensor_parallel_size,
        max_model_len, dtype, gpu_memory_utilization, speculative_config.

        Raises ConfigError for an invalid model, configuration or option, TypeError for an unknown option."""
        if unknown := [name for name in options if not vllm_options.is_option(name)]:
            raise TypeError(f"{unknown[0]}: LLM has no such option; docs/coming-from-vllm.md lists them")
        if names_model(str(model)):
            args, base = model_args(str(model), draft, revision), Path.cwd()
        elif draft is not None or revision is not None:
            raise ConfigError(f"draft, revision: only with a model; {model} is a config file: write it there")
        else:
            path = find_config(model)
            args, base = dict(read_args(path)), path.resolve().parent
        parsed = checked(_with(args, options), base)
        self.tokenizer = ChatTokenizer.from_folder(parsed.model.path)
        self._numbers = count()
        self._stack = contextlib.ExitStack()
        try:
            self._engine = self._stack.enter_context(local_engine(engine_spec(parsed)))
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the ranks."""
        self._stack.close()

    def get_tokenizer(self) -> ChatTokenizer:
        """The model's tokenizer and chat template."""
        return self.tokenizer

    def generate(self, prompts: Any, sampling_params: Params = None, use_tqdm: bool = True) -> list[RequestOutput]:
        """Return the continuations of prompts, in order.

        prompts: a text, a list of token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a list of these.
        sampling_params: for all prompts, or one per prompt; default: greedy answers of up to 256 tokens.
        use_tqdm: show progress on a terminal.
        Raises RequestTooLargeError for a prompt that can never run, TypeError for an invalid prompt. After Ctrl-C the
        engine remains usable."""
        is_one = isinstance(prompts, str | Mapping) or is_token_ids(prompts)
        found = [prompt_of(prompt) for prompt in ([prompts] if is_one else prompts)]
        texts = [text for text, _ in found if text is not None]
        encoded = iter(self._encoded(texts, add_special_tokens=True))
        given = [(text, next(encoded) if tokens is None else tokens) for text, tokens in found]
        return self._answer(given, sampling_params, use_tqdm)

    def chat(
        self, messages: Messages | Sequence[Messages], sampling_params: Params = None, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Return the assistant's answer to a conversation, or to each of a list of conversations; see `generate`.

        messages: {"role", "content"} and other keys of the model's template.
        Raises ChatTemplateError for messages that the template refuses."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        texts = [self.tokenizer.render(conversation) for conversation in conversations]  # type: ignore[arg-type]
        encoded = self._encoded(texts, add_special_tokens=False)
        given = [(text.text, tokens) for text, tokens in zip(texts, encoded, strict=True)]
        return self._answer(given, sampling_params, use_tqdm)

    def _encoded(self, texts: Sequence[str | ChatText], add_special_tokens: bool) -> list[list[int]]:
        async def encode() -> list[list[int]]:
            return [await self.tokenizer.encode(text, add_special_tokens) for text in texts]

        return asyncio.run(encode())

    def _answer(
        self, prompts: Sequence[tuple[str | None, list[int]]], params: Params, use_tqdm: bool
    ) -> list[RequestOutput]:
        """Answer prompts, each a text (None if unknown) and token ids."""
        each = [params or GREEDY] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"sampling_params: {len(each)} for {len(prompts)} prompts; give one for all, or one each")
        groups = [
            [RunningAnswer(f"offline-{next(self._numbers)}", tokens, p, n, self.tokenizer) for n in range(p.n)]
            for (_, tokens), p in zip(prompts, each, strict=True)
        ]
        running = {answer.request.request_id: answer for group in groups for answer in group}
        # None: tqdm shows nothing if stderr is not a terminal
        with tqdm(total=len(running), desc="answers", disable=None if use_tqdm else True) as progress:

            def listen(output: StepOutput) -> bool:
                ended = running[output.request.request_id].push(output)
                progress.update(ended or output.finish_reason is not None)
                return ended

            requests = [answer.request for answer in running.values()]
            self._engine.run(requests, self._engine.scheduler.num_slots, listen)
        return [
            RequestOutput(
                request_id=group[0].request.request_id,
                prompt=text,
                prompt_token_ids=tokens,
                outputs=[answer.output() for answer in group],
                num_cached_tokens=group[0].request.cached_tokens,
            )
            for (text, tokens), group in zip(prompts, groups, strict=True)
        ]


def _with(args: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `args` with the keys of keyword arguments. Raises ConfigError."""
    try:
        keys, _ = vllm_options.changes(options, python=True)
    except OptionError as error:
        raise ConfigError(str(error)) from None
    if server := [key for key in keys if key.startswith("ingress.")]:
        raise ConfigError(f"{server[0]}: is a server's; LLM has none")
    return use_options(args, keys)
