"""A model's tokenizer and its running engine, which `LLM` and `AsyncLLM` share. Parameters and methods of vLLM's `LLM`
that Aerie cannot honour are refused by name with a reason."""

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import secrets
import threading
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any, Self

import msgspec
from transformers import AutoTokenizer

from aerie.cluster.assembly import engine_spec
from aerie.cluster.config import AerieConfig, ConfigError, read_args
from aerie.cluster.coordinator.state_publisher import engine_stats
from aerie.cluster.http.config import EdgeConfig
from aerie.cluster.http.errors import ApiError
from aerie.cluster.http.metrics import prometheus_text
from aerie.cluster.http.requests.grammar_checker import ProcessChecker
from aerie.cluster.http.requests.image_reader import image_reader
from aerie.cluster.http.requests.parameters import (
    answer_tokens,
    choice_seed,
    sampling_params,
    stop_strings,
    truncation_of,
    with_sampling_defaults,
)
from aerie.cluster.http.requests.prompts import check_token_ids
from aerie.cluster.http.requests.structured_output import GrammarMaker
from aerie.cluster.http.schema.body import Refusals
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.cluster.transport.messages import TokenDelta
from aerie.deploy.checks import checked
from aerie.deploy.config import vllm_options
from aerie.deploy.config.files import find_config
from aerie.deploy.config.model import model_args, names_model, use_options
from aerie.deploy.config.vllm_values import OptionError
from aerie.deploy.offline.engine_thread import EngineThread
from aerie.deploy.offline.outputs import Metric, RunningAnswer, metrics_of
from aerie.deploy.offline.prompts import LoRARequest, Messages, Prompt, chat_prompt
from aerie.deploy.offline.sampling_params import LIMITS, SamplingParams, honoured
from aerie.speculative.build import plan_engine
from aerie.workers.scheduling.plan import Grammar
from aerie.workers.scheduling.request import Request, RequestTooLargeError, UnfinishedError

DEFAULT_TOKENS = 256  # maximum tokens of an answer without sampling parameters
GRAMMAR_TIMEOUT_S = 60.0  # limit for the compilation of a grammar


class EngineArgs:
    """The arguments of `aerie.deploy.offline.llm.LLM`, for `AsyncLLM.from_engine_args`."""

    def __init__(self, model: str | Path = "eagle", **options: Any) -> None:
        self.model = model
        self.options = options

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add the arguments to a script's own, so that `LLM(**vars(parser.parse_args()))` takes them."""
        parser.add_argument("--model", default="eagle", help="a folder, OWNER/NAME, or a configuration")
        vllm_options.add_options(parser, prefix="")
        return parser

    @classmethod
    def from_cli_args(cls, arguments: argparse.Namespace) -> Self:
        """Return the arguments among a script's own."""
        return cls(arguments.model, **vllm_options.given(arguments, prefix=""))


AsyncEngineArgs = EngineArgs


class OfflineEngine:
    """An engine in this process. tokenizer: the model's tokenizer and chat template."""

    def __init__(self, model: str | Path, draft: str | None, revision: str | None, options: Mapping[str, Any]) -> None:
        """See `aerie.deploy.offline.llm.LLM`."""
        config = _config(model, draft, revision, options)
        spec = engine_spec(config)
        self._source = config.model
        self.folder = config.model.folder
        self.tokenizer = ChatTokenizer.from_folder(self.folder)
        self._numbers = count()
        self._grammars = ProcessChecker(self.folder, GRAMMAR_TIMEOUT_S, self.tokenizer.num_ids)
        self._trying, self._loading = threading.Lock(), threading.Lock()
        self._adapters: dict[str, tuple[str, Future[str]]] = {}  # the path and last load of each adapter
        self._last_tried: Grammar | None = None
        try:
            limit = plan_engine(spec).layout.max_model_len
            defaults = {f"default_{name}": value for name, value in config.ingress.sampling_defaults.items()}
            limits = dataclasses.replace(LIMITS, max_model_len=limit, **defaults)
            self._limits: EdgeConfig = with_sampling_defaults(limits, self.tokenizer.sampling_defaults)
            self.thread = EngineThread(spec)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def default_sampling_params(self) -> SamplingParams:
        """Return the model's recommended parameters, else greedy sampling."""
        known: dict[str, Any] = {**self._limits.sampling_defaults} or {"temperature": 0.0}
        return SamplingParams(max_tokens=DEFAULT_TOKENS, **known)

    @functools.lru_cache(8)  # noqa: B019 - as long-lived as the engine
    def _tokenizer_with(self, chat_template: str) -> ChatTokenizer:
        """Return the tokenizer with another chat template. Raises ValueError."""
        if "{" not in chat_template:
            raise ValueError(f"chat_template={chat_template!r:.80}: must be a template's text; read it from its file")
        return ChatTokenizer.from_folder(self.folder, chat_template)

    async def answers(self, prompt: Prompt, params: SamplingParams, adapter: str = "") -> list[RunningAnswer]:
        """Return the answers to a prompt, which have not started. adapter: see `load_adapter`. Raises ValueError,
        RequestTooLargeError for a prompt that is too long."""
        try:
            return await self._answers(prompt, params, adapter)
        except ApiError as error:
            kind = RequestTooLargeError if error.code == "context_length_exceeded" else ValueError
            raise kind(error.message) from None

    async def _answers(self, prompt: Prompt, params: SamplingParams, adapter: str) -> list[RunningAnswer]:
        """Do `answers`, but raise ApiError as the server does."""
        body, limits, tokenizer = params.body(), self._limits, self.tokenizer
        if prompt.cache_salt is not None:
            body.cache_salt = prompt.cache_salt
        truncation = truncation_of(body, params.max_tokens, limits)
        if prompt.embeds is not None and params.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs: embeddings stand for the whole prompt, and have no tokens; leave it out")
        tokens, inputs = await prompt.encoded(tokenizer, limits, truncation)
        left = answer_tokens(len(tokens), None, True, limits)
        budget = left if params.max_tokens is None else min(left, params.max_tokens)
        logprobs, scored = (-1 if num is None else num for num in (params.logprobs, params.prompt_logprobs))
        eos = frozenset(() if params.ignore_eos else tokenizer.eos_token_ids)
        check_token_ids("allowed_token_ids", body.allowed_token_ids or [], tokenizer)
        param, grammar = GrammarMaker(limits, eos).from_body(body) or ("", None)
        if grammar is not None and grammar != self._last_tried:
            await asyncio.to_thread(self._try, grammar, param)
        sampling = msgspec.structs.replace(
            sampling_params(body, logprobs, eos, grammar, limits, tokenizer), max_tokens=budget, prompt_logprobs=scored
        )
        sampling = msgspec.structs.replace(sampling, adapter=adapter)
        stops, number = stop_strings(body.stop, limits), next(self._numbers)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        answers = []
        for i in range(params.n):
            own = msgspec.structs.replace(sampling, seed=choice_seed(seed, i))
            request = Request(f"offline-{number}-{i}", tokens, own, inputs=inputs)
            answers.append(RunningAnswer(request, params, stops, param, i, tokenizer))
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=-1)  # the first answer's are enough
        return answers

    def _try(self, grammar: Grammar, param: str) -> None:
        """Try a grammar, so that no request of a list runs if another one's form is invalid. Raises ApiError. One at a
        time, in an event loop of its own, because callers may have several loops."""
        with self._trying:
            try:
                asyncio.run(self._grammars.check(grammar, param))
            except ApiError as error:
                if error.status == 429:
                    return  # the machine is too busy; the engine will find a fault
                named = "" if error.message.startswith(param) else f"{param}: "
                raise ApiError(error.status, named + error.message, param=param, code=error.code) from None
            self._last_tried = grammar

    async def all_answers(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], adapters: Sequence[str]
    ) -> list[list[RunningAnswer]]:
        """Return the answers to each of several prompts. adapters: see `load_adapter`."""
        return [await self.answers(*arguments) for arguments in zip(prompts, params, adapters, strict=True)]

    def load_adapter(self, lora: LoRARequest | None) -> "Future[str]":
        """Load an adapter, unless it is loaded already. Return a future of its name, for `answers`; "" for None. The
        future raises ValueError for an adapter that does not fit."""
        if lora is None:
            none: Future[str] = Future()
            none.set_result("")
            return none
        try:
            name, path = str(lora.lora_name), str(Path(lora.lora_path).expanduser())
        except AttributeError:
            raise TypeError(f"lora_request: must be a LoRARequest, or None, not {type(lora).__name__}") from None
        with self._loading:
            known = self._adapters.get(name)
            if known is None or known[0] != path or (known[1].done() and known[1].exception() is not None):
                known = self._adapters[name] = (path, self.thread.load_adapter(name, path))
            return known[1]

    async def chat_prompts(
        self, conversations: Sequence[Messages], chat_template: str | None, *options: Any
    ) -> list[Prompt]:
        """Render conversations. chat_template: instead of the model's. options: see `chat_prompt`."""
        tokenizer = self.tokenizer if chat_template is None else self._tokenizer_with(chat_template)
        images = image_reader(self._source, self._limits)  # a new one, because callers may have several event loops
        return [await chat_prompt(conversation, tokenizer, images, *options) for conversation in conversations]

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; False while requests run."""
        try:
            self.thread.call(lambda engine: engine.scheduler.flush_prefix_cache()).result()
        except UnfinishedError:
            return False
        return True

    def metrics(self) -> list[Metric]:
        """Return the engine's metrics."""
        stats = self.thread.call(lambda engine: engine_stats(engine.scheduler, "0", "ready", "", 0, 0.0, ())).result()
        return metrics_of(prometheus_text([stats], self.folder.name).decode())

    @functools.cached_property
    def transformers_tokenizer(self) -> Any:
        """The model's tokenizer as transformers loads it."""
        return AutoTokenizer.from_pretrained(str(self.folder))

    def run(self, answers: Sequence[RunningAnswer]) -> Generator[list[RunningAnswer], None, None]:
        """Run answers to their ends. Yield those that have changed."""
        running = {answer.request_id: answer for answer in answers}
        with contextlib.closing(self.thread.run([answer.request for answer in answers])) as steps:
            for deltas in steps:
                yield self._push(running, deltas)

    async def stream(self, answers: Sequence[RunningAnswer]) -> AsyncGenerator[list[RunningAnswer], None]:
        """Do `run` in an event loop."""
        running = {answer.request_id: answer for answer in answers}
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


def _config(model: str | Path, draft: str | None, revision: str | None, options: Mapping[str, Any]) -> AerieConfig:
    """Return the configuration for `LLM`'s arguments. model: a checkpoint, name on the hub, or configuration file."""
    options = {name: value for name, value in options.items() if value is not None}
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
    if server := [key for key in keys if key.startswith("ingress.") and not key.startswith("ingress.default_")]:
        raise ConfigError(f"{server[0]}: is a server's; LLM has none")
    return use_options(args, keys)


PARAMETERS: Refusals = {
    "prompt_adapter_request": ("prompt adapters are not implemented", ()),
    "guided_options_request": ("use SamplingParams(structured_outputs=...)", ()),
    "tokenization_kwargs": ("use SamplingParams(truncate_prompt_tokens=...)", ({},)),
    "chat_template_content_format": ("contents are texts", ("auto", "string", "openai")),
    "data_parallel_rank": ("LLM has one engine", (0,)),
    "trace_headers": ("LLM writes no traces; a server does", ({},)),
    "prompt_text": ("give the text as prompt", ()),
    "prompt_token_ids": ("give token ids as the prompt", ()),
    "prompt_embeds": ('give {"prompt_embeds": tensor} as the prompt', ()),
    "multi_modal_data": ("prompts are text, token ids or embeddings", ({},)),
}
_NO_POOLING = "Aerie generates text; it has no pooling models"
_ONE_PROCESS = "ranks are Aerie's own processes; use get_metrics, or a server's profile"
METHODS = {
    **dict.fromkeys(("encode", "embed", "classify", "score", "reward"), _NO_POOLING),
    **dict.fromkeys(("collective_rpc", "apply_model", "start_profile", "stop_profile"), _ONE_PROCESS),
    **dict.fromkeys(("sleep", "wake_up"), "close() the engine, and build it again"),
    **dict.fromkeys(("pause_generation", "resume_generation"), "abort requests, and send them again"),
    "beam_search": "beam search is not implemented: ask for n answers, and rank them by their cumulative_logprob",
    "llm_engine": "there is no LLMEngine: use generate, chat, get_metrics or AsyncLLM",
    "set_tokenizer": "put tokenizer.json and tokenizer_config.json into the model's folder",
    "preprocess_chat": "use get_tokenizer().apply_chat_template",
}


def check_others(method: str, others: Mapping[str, Any]) -> None:
    """Raise ValueError for refused parameters, TypeError for unknown ones. Those without effect are accepted; see
    `honoured`."""
    if unknown := honoured(others, PARAMETERS):
        raise TypeError(f"{method}() got an unexpected keyword argument {next(iter(unknown))!r}")


def refused_method(owner: str, name: str) -> AttributeError:
    """Return the error for an attribute that does not exist."""
    reason = METHODS.get(name)
    return AttributeError(f"{owner!r} object has no attribute {name!r}" + (f": {reason}" if reason else ""))
