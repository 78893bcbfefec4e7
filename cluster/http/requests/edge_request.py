"""Converts a validated body to the engine's request: prompts as tokens, and one `SamplingParams` per choice; joins
requests of one prompt each. Called by the routes. Checks that depend on the model (length, vocabulary) or on several
parameters are here, in `limits` and in `reasoning`."""

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from aerie.cluster.http.config import EdgeConfig, OutputParserName
from aerie.cluster.http.errors import ApiError, invalid, unsupported
from aerie.cluster.http.parsers.reasoning import ThinkingBudget
from aerie.cluster.http.requests.image_prompt import encode_chat, images_of
from aerie.cluster.http.requests.parameters import (
    answer_tokens,
    chat_parser,
    check_model,
    check_scores,
    choice_seed,
    num_choices,
    sampling_params,
    separates_reasoning,
    stop_strings,
    thinking_budget,
    truncation_of,
)
from aerie.cluster.http.requests.prompts import (
    PLACEHOLDER,
    chat_text,
    check_token_ids,
    content_text,
    encode_prompt,
    listed_prompts,
    read_embeds,
    template_tool,
)
from aerie.cluster.http.requests.structured_output import GrammarMaker
from aerie.cluster.http.requests.tools import ToolCalling, answer_grammar, template_variables, tool_calling
from aerie.cluster.http.schema.request import BatchRequest, ChatCompletionRequest, CompletionRequest, requested
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.cluster.http.text.user_text import ChatText
from aerie.workers.prompt_inputs import PromptInputs
from aerie.workers.scheduling.plan import Grammar, SamplingParams


@dataclass(frozen=True)
class AnswerForm:
    """How to convert the tokens of a choice to text.

    eos_token_ids: stop tokens that are the model's end of sequence.
    echo_only: the reply contains only the prompt.
    """

    eos_token_ids: frozenset[int]
    stops: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    echo_only: bool


@dataclass(frozen=True)
class Choice:
    """One generation.

    prompt: index into EdgeRequest.prompts.
    grammar_param: the parameter of the body that asks for the grammar, for errors; "" without a grammar.
    """

    prompt: int
    sampling: SamplingParams
    form: AnswerForm
    grammar_param: str = ""


@dataclass(frozen=True)
class EdgeRequest:
    """A checked and tokenized request.

    choices: prompt by prompt, n of each.
    echo: texts before the answers, one per prompt, or none.
    prompt_texts: texts of chat prompts, one per prompt.
    continued: texts of the messages that chats' answers continue, one per prompt; "": none.
    logprobs: see `SamplingParams`.
    prompt_logprobs: the same for prompts. echo_logprobs: whether echoes have log-probabilities.
    tools: in the chat template's form.
    thinking_budget: None for no limit.
    include_reasoning: whether the reply shows reasoning.
    separate_reasoning: in a separate field.
    stream_reasoning: as it arrives.
    priority: as the client wants it, see `Owner`.
    inputs: inputs of the prompts besides their tokens, one per prompt, or none.
    reads_calls: whether the parser searches tool calls.
    parallel_calls: whether it shows more than the first.
    The other fields describe how to show the answer.
    """

    chat: bool
    prompts: list[list[int]]
    choices: list[Choice]
    echo: list[str]
    logprobs: int
    prompt_logprobs: int
    return_token_ids: bool
    return_token_origins: bool
    return_weight_versions: bool
    tokens_as_ids: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    output_parser: OutputParserName
    prompt_texts: tuple[str, ...] = ()
    continued: tuple[str, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    reads_calls: bool = False
    parallel_calls: bool = True
    include_reasoning: bool = True
    thinking_budget: ThinkingBudget | None = None
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    priority: int = 0
    inputs: tuple[PromptInputs, ...] = ()

    @property
    def num_input_bytes(self) -> int:
        """Bytes of the prompts' inputs besides tokens."""
        return sum(inputs.num_bytes for inputs in self.inputs)

    @property
    def echo_logprobs(self) -> bool:
        return bool(self.echo) and self.logprobs >= 0 and not self.chat

    @property
    def grammars(self) -> dict[Grammar, str]:
        """The answers' grammars, and the parameter of each."""
        pairs = ((choice.sampling.grammar, choice.grammar_param) for choice in self.choices)
        return {grammar: param for grammar, param in pairs if grammar is not None}

    @property
    def is_constrained(self) -> bool:
        return bool(self.grammars)

    @property
    def scores_prompt(self) -> bool:
        """Whether the reply has log-probabilities of prompts."""
        return self.prompt_logprobs >= 0 or self.echo_logprobs


async def chat_request(body: ChatCompletionRequest, config: EdgeConfig, tokenizer: ChatTokenizer) -> EdgeRequest:
    """Return the engine's request for a chat. Raises ApiError."""
    check_model(body.model, config)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise invalid("max_tokens", "max_tokens and max_completion_tokens differ; give only one of them")
    num_choices(body.n, 1, config)
    calls = tool_calling(body, config, tokenizer.shows_tools)
    logprobs = (body.top_logprobs or 0) if body.logprobs else -1
    max_tokens = body.max_completion_tokens or body.max_tokens
    last = content_text(body.messages[-1].content or "") if body.messages[-1].role == "assistant" else ""
    text, prompt, inputs = await _chat_prompt(body, calls, max_tokens, config, tokenizer)
    request = _request(body, [prompt], [last] if body.echo and last else [], logprobs, max_tokens, config, tokenizer)
    continued = last if body.continue_final_message else ""
    first, template = request.choices[0], tokenizer.template_source
    maker = GrammarMaker(config, first.form.eos_token_ids)
    if body.allowed_token_ids or body.bad_words:  # holds for the whole answer, including reasoning
        grammar = first.sampling.grammar
        if calls.forced or any(tool.function.strict for tool in calls.tools):
            raise invalid("tools", "constrained tool calls cannot be combined with allowed_token_ids or bad_words")
    else:
        grammar = answer_grammar(first.sampling.grammar, calls, request.output_parser, text, template, maker, continued)
    if grammar is not None and first.sampling.min_tokens:
        raise invalid("min_tokens", "min_tokens cannot be combined with a form of answer, which says where it may end")
    return dataclasses.replace(
        request,
        choices=[
            dataclasses.replace(
                choice,
                sampling=msgspec.structs.replace(choice.sampling, grammar=grammar),
                grammar_param=choice.grammar_param or "tools",
            )
            for choice in request.choices
        ],
        prompt_texts=(text,),
        continued=(continued,),
        tools=tuple(template_tool(tool) for tool in calls.tools),
        reads_calls=bool(calls.tools),
        parallel_calls=calls.parallel,
        include_reasoning=body.include_reasoning is not False,
        thinking_budget=await thinking_budget(body, request.output_parser, tokenizer),
        separate_reasoning=separates_reasoning(body, request.output_parser),
        stream_reasoning=body.stream_reasoning is not False,
        inputs=() if inputs is None else (inputs,),
    )


async def chat_prompt_of(body: ChatCompletionRequest, config: EdgeConfig, tokenizer: ChatTokenizer) -> list[int]:
    """Return the tokens of a chat's prompt, which may be a few more than the model's length. Raises ApiError."""
    check_model(body.model, config)
    text = await _chat_text(body, tool_calling(body, config, tokenizer.shows_tools), config, tokenizer)
    return (await encode_chat(text, images_of(body.messages), tokenizer, config))[0]


async def _chat_prompt(
    body: ChatCompletionRequest,
    calls: ToolCalling,
    max_tokens: int | None,
    config: EdgeConfig,
    tokenizer: ChatTokenizer,
) -> tuple[str, list[int], PromptInputs | None]:
    """Return the text, the tokens and the other inputs of a chat's prompt."""
    images = images_of(body.messages)
    for name in ("input_ids", "truncate_prompt_tokens") if images else ():
        if vars(body)[name] is not None:
            raise unsupported(name, "with images the prompt is that of the messages, and whole")
    if body.input_ids is not None:
        prompt = check_token_ids("input_ids", body.input_ids, tokenizer)
        return await tokenizer.decode_long(prompt), prompt, None
    chat = await _chat_text(body, calls, config, tokenizer)
    truncation = truncation_of(body, max_tokens, config)
    return chat.text, *await encode_chat(chat, images, tokenizer, config, truncation)


async def _chat_text(
    body: ChatCompletionRequest, calls: ToolCalling, config: EdgeConfig, tokenizer: ChatTokenizer
) -> ChatText:
    continued = body.continue_final_message is True
    return await chat_text(
        body.messages,
        tokenizer,
        not continued if body.add_generation_prompt is None else body.add_generation_prompt,
        {**(config.chat_template_kwargs or {}), **(template_variables(body, tokenizer) or {})},
        calls.tools,
        continued,
    )


async def text_request(body: CompletionRequest, config: EdgeConfig, tokenizer: ChatTokenizer) -> EdgeRequest:
    """Return the engine's request for a completion. Raises ApiError."""
    check_model(body.model, config)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "it must equal n; request n choices and rank them by logprobs")
    if body.echo and body.truncate_prompt_tokens is not None:
        raise unsupported("echo", "with truncate_prompt_tokens it would show text that the model did not see")
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens", "max_tokens must be at least 1, or 0 with echo: true for the prompt alone")
    if body.prompt_embeds is not None:
        return _embedded_request(body, config, tokenizer)
    listed = listed_prompts(body.prompt, config.max_choices, tokenizer)
    num_choices(body.n, len(listed), config)
    truncation = truncation_of(body, body.max_tokens, config)
    prompts = [
        await encode_prompt(prompt, body.add_special_tokens is not False, "prompt", tokenizer, config, truncation)
        if isinstance(prompt, str)
        else prompt
        for prompt in listed
    ]
    skips = body.skip_special_tokens is not False
    echo = [p if isinstance(p, str) else await tokenizer.decode_long(p, skips) for p in listed] if body.echo else []
    logprobs = -1 if body.logprobs is None else body.logprobs
    return _request(body, prompts, echo, logprobs, body.max_tokens, config, tokenizer)


def _embedded_request(body: CompletionRequest, config: EdgeConfig, tokenizer: ChatTokenizer) -> EdgeRequest:
    """Return the request of a body with `prompt_embeds`."""
    values = vars(body)
    for name in ("prompt", "echo", "prompt_logprobs", "truncate_prompt_tokens"):
        if values[name] not in (None, False, "", []):
            raise unsupported(name, "embeddings stand for the whole prompt, and have no tokens")
    inputs = read_embeds(body.prompt_embeds, config.max_choices)
    prompts = [[PLACEHOLDER] * part.embeddings[0].num_rows for part in inputs]
    logprobs = -1 if body.logprobs is None else body.logprobs
    request = _request(body, prompts, [], logprobs, body.max_tokens, config, tokenizer)
    return dataclasses.replace(request, inputs=tuple(inputs))


def _request(
    body: ChatCompletionRequest | CompletionRequest,
    prompts: list[list[int]],
    echo: list[str],
    logprobs: int,
    max_tokens: int | None,
    config: EdgeConfig,
    tokenizer: ChatTokenizer,
) -> EdgeRequest:
    """Check a body's parameters, and return its request with one `Choice` for each prompt and each of its `n` answers.
    Raises ApiError.

    prompts: token ids of each prompt.
    echo: texts to repeat before the answers, one per prompt; empty without `echo`.
    logprobs: number of top log-probabilities; -1: none.
    """
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options is only allowed with stream: true")
    chat = isinstance(body, ChatCompletionRequest)
    n = num_choices(body.n, len(prompts), config)
    if (truncation := truncation_of(body, max_tokens, config)) is not None:
        prompts = [truncation.of(prompt) for prompt in prompts]
    eos = frozenset(() if body.ignore_eos else tokenizer.eos_token_ids)
    prompt_logprobs = -1 if body.prompt_logprobs is None else body.prompt_logprobs
    scored = max(prompt_logprobs, logprobs if echo else -1)
    check_scores(body, scored, sum(map(len, prompts)) * n, config)
    check_token_ids("allowed_token_ids", body.allowed_token_ids or [], tokenizer)
    grammar_param, grammar = GrammarMaker(config, eos).from_body(body) or ("", None)
    sampling = sampling_params(body, logprobs, eos, grammar, config, tokenizer)
    sampling = msgspec.structs.replace(sampling, prompt_logprobs=scored)
    form = AnswerForm(
        eos_token_ids=eos,
        stops=stop_strings(body.stop, config),
        include_stop=bool(body.include_stop_str_in_output or body.no_stop_trim),
        skip_special_tokens=body.skip_special_tokens is not False,
        echo_only=max_tokens == 0,
    )
    random_seed, seed = secrets.randbits(64), requested(body).get("seed")
    choices = []
    for p, prompt in enumerate(prompts):
        budget = answer_tokens(len(prompt), max_tokens if max_tokens != 0 else 1, chat, config)
        if sampling.min_tokens > budget:
            raise invalid("min_tokens", f"min_tokens={sampling.min_tokens} is more than the {budget} tokens allowed")
        for i in range(n):
            # With a seed, each prompt of a batch gets the same answer as alone.
            own_seed = choice_seed(random_seed, p * n + i) if seed is None else choice_seed(seed, i)
            own = msgspec.structs.replace(sampling, max_tokens=budget, seed=own_seed)
            choices.append(Choice(p, own, form, grammar_param))
    options = body.stream_options
    return EdgeRequest(
        chat=chat,
        priority=body.priority or 0,
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        prompts=prompts,
        choices=choices,
        echo=echo,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        return_token_ids=bool(body.return_token_ids),
        return_token_origins=bool(body.return_token_origins),
        return_weight_versions=bool(body.return_weight_versions),
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        output_parser=chat_parser(config) if chat else "text",
    )


async def batch_request(body: BatchRequest, config: EdgeConfig, tokenizer: ChatTokenizer) -> EdgeRequest:
    """Return the chats of a batch as one request with a prompt for each. Raises ApiError."""
    if len(body.messages) > config.max_choices:
        raise invalid("messages", f"{len(body.messages)} conversations are more than {config.max_choices}")
    values = {name: getattr(body, name) for name in body.model_fields_set - {"messages", *(body.model_extra or ())}}
    chats = []
    for i, messages in enumerate(body.messages):
        try:
            conversation = ChatCompletionRequest.model_construct(messages=messages, **values)
            chats.append(await chat_request(conversation, config, tokenizer))
        except ApiError as error:
            if error.param is not None and error.param.startswith("messages"):
                error.param = error.param.replace("messages", f"messages[{i}]", 1)
                error.message = error.message.replace("messages", f"messages[{i}]", 1)
            raise
    return joined_request(chats)


def joined_request(requests: Sequence[EdgeRequest]) -> EdgeRequest:
    """Join requests of one prompt each, which differ only in prompts, choices and echoes."""
    return dataclasses.replace(
        requests[0],
        prompts=[request.prompts[0] for request in requests],
        prompt_texts=tuple(text for request in requests for text in request.prompt_texts),
        continued=tuple(text for request in requests for text in request.continued),
        choices=[
            dataclasses.replace(choice, prompt=i) for i, request in enumerate(requests) for choice in request.choices
        ],
        inputs=(
            tuple((request.inputs or (PromptInputs(),))[0] for request in requests)
            if any(request.inputs for request in requests)
            else ()
        ),
        echo=[(request.echo or [""])[0] for request in requests] if any(request.echo for request in requests) else [],
    )
