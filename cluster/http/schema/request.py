"""OpenAI's chat and completion requests, with vLLM's extensions.

A parameter is supported, ignored because it has no effect, refused with a reason (`REFUSED`), or unknown
(`aerie.cluster.http.schema.body`). `aerie.cluster.http.requests.edge_request` makes the checks that need the tokenizer.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, RootModel, WithJsonSchema, create_model

from aerie.cluster.http.schema.body import Refusals, Schema
from aerie.cluster.http.schema.message import Message, ReasoningEffort, ToolChoice, Tools
from aerie.workers.scheduling.plan import MAX_STOP_TOKEN_IDS, VALUES

Model = TypeVar("Model", bound=Schema)
RequestId = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[!-~]+$")]
Count = Annotated[int, Field(ge=1, lt=2**31)]
MAX_ALLOWED_TOKENS = 1024  # maximum entries of allowed_token_ids
MAX_BAD_WORDS = 128  # maximum entries of bad_words
BadWord = Annotated[str, Field(min_length=1, max_length=256)]
# Descriptions only: `aerie.cluster.http.requests.edge_request` and the modules that it calls check these fields, so
# that errors name the invalid entry.
_STRINGS = {"type": "array", "items": {"type": "string"}}
_TOKENS = {"type": "array", "items": {"type": "integer"}}
Stop = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS, {"type": "null"}]})]
Prompt = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS, _TOKENS, {"type": "array", "items": _TOKENS}]})
]
JSONSchema = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]})]
Strings = Annotated[Any, WithJsonSchema({"anyOf": [_STRINGS, {"type": "null"}]})]
TokenIds = Annotated[Any, WithJsonSchema(_TOKENS)]
_NO_TOOLS = "use tools and tool_choice, which came in its place"
_NO_LORA = "name the adapter as `model`"
# Parameters of transformers, llama.cpp and others that would change the answer, with the values that switch them off.
OTHER_SAMPLERS = {
    "typical_p": 1,
    "top_a": 0,
    "tfs": 1,
    "mirostat": 0,
    "dry_multiplier": 0,
    "xtc_probability": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
}
REFUSED: Refusals = {
    "max_new_tokens": ("use max_tokens", ()),
    "repeat_penalty": ("use repetition_penalty", (1, 1.0)),
    "functions": (_NO_TOOLS, ([],)),
    "function_call": (_NO_TOOLS, ("none",)),
    "guided_whitespace_pattern": ("use structured_outputs with disable_any_whitespace", ()),
    "audio": ("answers are text only", ()),
    "modalities": ("answers are text only", (["text"],)),
    "suffix": ("fill-in-the-middle is not implemented", ("",)),
    "use_beam_search": ("beam search is not implemented", (False,)),
    "logits_processors": ("code from requests is not run", ([],)),
    "lora_request": (_NO_LORA, ()),
    "lora_path": (_NO_LORA, ()),
    "adapter": (_NO_LORA, ()),
    "chat_template": ("templates from requests are not run; the model's own is used", ()),
    "documents": ("the chat template gets messages only", ([],)),
    "spaces_between_special_tokens": ("text is decoded without added spaces", (True,)),
    "kv_transfer_params": ("prefill and decode run in one engine", ({},)),
    "vllm_xargs": ("there are no extensions by that name", ({},)),
    "ec_transfer_params": ("prefill and decode run in one engine", ({},)),
    "watermarking": ("watermarks are not implemented", (False,)),
    "repetition_detection": ("use repetition_penalty, frequency_penalty or max_tokens", ()),
    "return_token_offsets": ("use return_token_ids, or logprobs with their text_offset", (False,)),
    "return_prompt_text": ("use echo, or /detokenize with return_token_ids", (False,)),
    "return_hidden_states": ("hidden states stay in the engine", (False,)),
    "return_routed_experts": ("which experts ran stays in the engine", (False,)),
    "return_meta_info": ("see usage and metrics", (False,)),
    "logprob_token_ids": ("use top_logprobs, up to 20 of the likeliest tokens", ([],)),
    "stop_regex": ("use stop, or regex for the form of the whole answer", ([], "")),
    "input_embeds": ("prompts are text or token ids", ()),
    "custom_logit_processor": ("code from requests is not run", ()),
    "session_params": ("send the whole conversation; the prefix cache finds its beginning", ({},)),
    **{name: ("this sampler is not implemented", (off,)) for name, off in OTHER_SAMPLERS.items()},
}
# They leave the meaning of the answer: see `Schema.ignored`.
IGNORED: Mapping[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default", "flex", "scale", "priority"),
    "prediction": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "guided_decoding_backend": ("auto", "xgrammar"),
    "length_penalty": (1,),  # for beam search only, as the next one
    "early_stopping": (False,),
    "mm_processor_kwargs": ({},),
}
_CHATS_ONLY = "it belongs to /v1/chat/completions"
_TEXTS_ONLY = "it belongs to /v1/completions"
NO_EMBEDS: Refusals = {"prompt_embeds": (_TEXTS_ONLY, ())}
CHAT_REFUSED: Refusals = REFUSED | NO_EMBEDS | {"prompt": (_TEXTS_ONLY, ()), "best_of": ("ask for n choices", (1,))}
TEXT_REFUSED: Refusals = REFUSED | {
    "messages": (_CHATS_ONLY, ()),
    "tools": (_CHATS_ONLY, ([],)),
    "max_completion_tokens": ("use max_tokens", ()),
}


class StreamOptions(Schema):
    """Extra content of a stream.

    include_usage: send the usage before the last event.
    continuous_usage_stats: send the usage in every event.
    include_obfuscation: accepted without effect; events are never padded.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


def with_values(names: Mapping[str, str] | None = None) -> Callable[[type[Model]], type[Model]]:
    """Return a decorator that adds a field to a schema for each declared value (`aerie.workers.request_values`), None
    by default. names: the fields' names that differ from the values'."""
    fields: dict[str, Any] = {}
    for name, value in VALUES.items():
        kind: Any = Annotated[value.kind, Field(**value.bounds)]
        fields[(names or {}).get(name, name)] = kind | None, None

    def decorated(schema: type[Model]) -> type[Model]:
        return create_model(
            schema.__name__, __base__=schema, __module__=schema.__module__, __doc__=schema.__doc__, **fields
        )

    return decorated


def requested(body: Schema) -> dict[str, Any]:
    """Return the declared values that a request has, by name; those that are null are left out."""
    return {name: value for name in VALUES if (value := vars(body)[name]) is not None}


class CommonSampling(Schema):
    """Sampling parameters, besides the declared values, that OpenAI's, vLLM's and SGLang's clients spell alike. Ranges
    are OpenAI's where OpenAI has the parameter, else vLLM's."""

    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = None
    stop: Stop = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None


@with_values()
class SamplingFields(CommonSampling):
    """Parameters that all of OpenAI's routes share."""

    model: str | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: dict[str, Any] | None = None  # see `aerie.cluster.http.requests.structured_output`
    allowed_token_ids: Annotated[list[int], Field(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: int | None = None  # lower is more urgent, as in vLLM
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: RequestId | None = None
    # SGLang's names for include_stop_str_in_output and request_id.
    no_stop_trim: bool | None = None
    rid: RequestId | None = None
    # OpenAI uses these for its own accounting; they have no effect here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class _SamplingRequest(SamplingFields):
    """Common parameters of chats and completions."""

    n: int | None = None
    max_tokens: Count | None = None
    return_token_ids: bool | None = None
    return_token_origins: bool | None = None
    return_weight_versions: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # The format of the answer; read by `aerie.cluster.http.requests.structured_output`.
    response_format: dict[str, Any] | None = None
    guided_json: JSONSchema = None
    guided_regex: str | None = None
    guided_choice: Strings = None
    guided_grammar: str | None = None
    json_schema: JSONSchema = None
    regex: str | None = None
    ebnf: str | None = None


class ChatCompletionRequest(_SamplingRequest):
    """Continue a conversation.

    echo: put the last message's text before the answer, if it is the assistant's.
    input_ids: the prompt's tokens, instead of messages rendered with the chat template (SGLang's).
    thinking_token_budget: maximum tokens of thinking; -1: no limit.
    separate_reasoning: false leaves reasoning in the content. stream_reasoning: false sends it whole (SGLang's).
    """

    refused = CHAT_REFUSED
    ignored = IGNORED

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: Literal[False] | None = None
    echo: bool | None = None
    input_ids: TokenIds | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(_SamplingRequest):
    """Continue a text. prompt_embeds: instead of a prompt, the embeddings of its tokens
    (`aerie.cluster.http.requests.prompts`)."""

    refused = TEXT_REFUSED
    ignored = IGNORED

    prompt: Prompt = None
    prompt_embeds: Strings = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = None
    include_reasoning: Literal[True] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class BatchRequest(ChatCompletionRequest):
    """Continue several independent conversations."""

    refused = CHAT_REFUSED | {
        "stream": ("a batch is answered as a whole", (False,)),
        "n": ("a batch has one answer for each conversation", (1,)),
        "tools": ("a batch calls no tools", ([],)),
        "tool_choice": ("a batch calls no tools", ("none", "auto")),
        "prompt_logprobs": ("ask for them one conversation at a time", ()),
        "input_ids": ("send each prompt to /v1/completions", ()),
    }

    messages: Annotated[  # type: ignore[assignment]
        list[Annotated[list[Message], Field(min_length=1)]], Field(min_length=1)
    ]


class Invocation(RootModel[ChatCompletionRequest | CompletionRequest]):
    """A chat's request, if it has `messages`, else a completion's."""

    @classmethod
    def choose(cls, values: Mapping[str, Any]) -> type[Schema]:
        """Return the schema of a body: that of chats if it has messages, else that of completions."""
        return ChatCompletionRequest if "messages" in values else CompletionRequest


class TokenizeRequest(Schema):
    """The tokens of one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Schema):
    """The text of `tokens`."""

    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool | None = None
