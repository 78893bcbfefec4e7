"""A model's tokenizer and its running engine, which `LLM` and `AsyncLLM` share."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from cluster.assembly import engine_spec
from cluster.config import AerieConfig, ConfigError, read_args
from cluster.http.text.tokenizer import ChatTokenizer
from cluster.http.text.user_text import ChatText
from cluster.transport.messages import TokenDelta
from deploy.checks import checked
from deploy.config import vllm_options
from deploy.config.files import find_config
from deploy.config.model import model_args, names_model, use_options
from deploy.config.vllm_values import OptionError
from deploy.offline.engine_thread import EngineThread
from deploy.offline.outputs import RunningAnswer, SamplingParams

T = TypeVar("T")


class EngineArgs:
    """The arguments of `deploy.offline.llm.LLM`, for `AsyncLLM.from_engine_args`."""

    def __init__(self, model: str | Path = "eagle", **options: Any) -> None:
        self.model = model
        self.options = options


AsyncEngineArgs = EngineArgs


class OfflineEngine:
    """An engine in this process. tokenizer: the model's tokenizer and chat template."""

    def __init__(self, model: str | Path, draft: str | None, revision: str | None, options: Mapping[str, Any]) -> None:
        """See `deploy.offline.llm.LLM`."""
        config = _config(model, draft, revision, options)
        self.tokenizer = ChatTokenizer.from_folder(config.model.path)
        self._numbers = count()
        try:
            self.thread = EngineThread(engine_spec(config))
        except ValueError as error:
            raise ConfigError(str(error)) from None

    async def encoded(self, texts: Iterable[str | ChatText], add_special_tokens: bool) -> list[list[int]]:
        """Return the token ids of each text."""
        return [await self.tokenizer.encode(text, add_special_tokens) for text in texts]

    def answers(self, prompt: list[int], params: SamplingParams) -> list[RunningAnswer]:
        """Return the answers to a prompt, which have not started."""
        number = next(self._numbers)
        return [RunningAnswer(f"offline-{number}-{i}", prompt, params, i, self.tokenizer) for i in range(params.n)]

    def run(self, answers: Sequence[RunningAnswer]) -> Generator[list[RunningAnswer], None, None]:
        """Run answers to their ends. Yield those that have changed."""
        running = {answer.request.request_id: answer for answer in answers}
        with contextlib.closing(self.thread.run([answer.request for answer in answers])) as steps:
            for deltas in steps:
                yield self._push(running, deltas)

    async def stream(self, answers: Sequence[RunningAnswer]) -> AsyncGenerator[list[RunningAnswer], None]:
        """Do `run` in an event loop."""
        running = {answer.request.request_id: answer for answer in answers}
        async with contextlib.aclosing(self.thread.stream([answer.request for answer in answers])) as steps:
            async for deltas in steps:
                yield self._push(running, deltas)

    def _push(self, running: Mapping[str, RunningAnswer], deltas: Iterable[TokenDelta]) -> list[RunningAnswer]:
        """Add deltas to their answers, and end requests whose answers a stop string has ended. Return the answers that
        have changed."""
        changed = {}
        for delta in deltas:
            answer = running[delta.request_id]
            if answer.is_finished:
                continue
            answer.push(delta)
            if answer.is_finished and delta.finish is None:
                self.thread.abort([delta.request_id])
            if answer.is_finished or delta.tokens:
                changed[delta.request_id] = answer
        return list(changed.values())


def finished(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine, from any thread, also one whose event loop runs (a notebook's)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def _config(model: str | Path, draft: str | None, revision: str | None, options: Mapping[str, Any]) -> AerieConfig:
    if unknown := [name for name in options if not vllm_options.is_option(name)]:
        raise TypeError(f"{unknown[0]}: LLM has no such option; docs/coming-from-vllm.md lists them")
    if names_model(str(model)):
        args, base = model_args(str(model), draft, revision), Path.cwd()
    elif draft is not None or revision is not None:
        raise ConfigError(f"draft, revision: only with a model; {model} is a config file: write it there")
    else:
        path = find_config(model)
        args, base = dict(read_args(path)), path.resolve().parent
    return checked(_with(args, options), base)


def _with(args: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `args` with the keys of keyword arguments. Raises ConfigError."""
    try:
        keys, _ = vllm_options.changes(options, python=True)
    except OptionError as error:
        raise ConfigError(str(error)) from None
    if server := [key for key in keys if key.startswith("ingress.")]:
        raise ConfigError(f"{server[0]}: is a server's; LLM has none")
    return use_options(args, keys)
