"""What clients may send: OpenAI's chat and completion requests with the extensions that vLLM's clients know.

A body becomes a checked request, or an ApiError that names the parameter. Nothing is ignored in silence: a parameter is
honoured, known to be harmless, refused with a reason (`REFUSED`), or unknown. Called by `cluster.http.endpoint`; what
needs the tokenizer is checked in `cluster.http.requests.edge_request`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from cluster.http.errors import ApiError, invalid, unsupported
from cluster.http.schema.message import MAX_TOOLS, Message, ReasoningEffort, Tool, ToolChoice
from workers.scheduling.plan import MAX_STOP_TOKEN_IDS

Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
RequestId = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[!-~]+$")]
Count = Annotated[int, Field(ge=1, lt=2**31)]
MAX_ALLOWED_TOKENS = 1024
MAX_BAD_WORDS = 128
BadWord = Annotated[str, Field(min_length=1, max_length=256)]
# Checked in `cluster.http.requests.edge_request` and the modules that it calls, whose messages name the entry; here
# only described.
_STRINGS = {"type": "array", "items": {"type": "string"}}
_TOKENS = {"type": "array", "items": {"type": "integer"}}
Stop = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS, {"type": "null"}]})]
Prompt = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS, _TOKENS, {"type": "array", "items": _TOKENS}]})
]
JSONSchema = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]})]
Strings = Annotated[Any, WithJsonSchema({"anyOf": [_STRINGS, {"type": "null"}]})]
TokenIds = Annotated[Any, WithJsonSchema(_TOKENS)]
# Checked before pydantic sees a body: it works through every element and holds the interpreter's lock meanwhile, 6-12 s
# for the worst bodies of 8 MB, in which no stream of this process would go on.
MAX_PARAMETERS = 128
MAX_MESSAGES = 4096
MAX_MESSAGE_FIELDS = 32
MAX_OBJECT_FIELDS = 1024  # of an object that is a parameter; logit_bias is the largest

Body = TypeVar("Body", bound=BaseModel)

# name -> (why it is refused, values that ask for nothing and so are accepted). null always asks for nothing.
_NO_TOOLS = "use tools and tool_choice, which came in its place"
_NO_LORA = "LoRA adapters are not implemented"
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "functions": (_NO_TOOLS, ([],)),
    "function_call": (_NO_TOOLS, ("none",)),
    "guided_whitespace_pattern": ("use structured_outputs with disable_any_whitespace", ()),
    "guided_decoding_backend": ("there is one: xgrammar", ("auto", "xgrammar")),
    "audio": ("answers are text only", ()),
    "modalities": ("answers are text only", (["text"],)),
    "prediction": ("predicted outputs are not implemented", ()),
    "web_search_options": ("web search is not implemented", ()),
    "verbosity": ("the model has no such control", ("low", "medium", "high")),
    "store": ("answers are not stored", (False,)),
    "service_tier": ("there is one tier", ("auto", "default", "flex", "scale", "priority")),
    "suffix": ("fill-in-the-middle is not implemented", ("",)),
    "use_beam_search": ("beam search is not implemented", (False,)),
    "length_penalty": ("beam search is not implemented", (1, 1.0)),
    "early_stopping": ("beam search is not implemented", (False,)),
    "logits_processors": ("code from requests is not run", ([],)),
    "lora_request": (_NO_LORA, ()),
    "lora_path": (_NO_LORA, ()),
    "adapter": (_NO_LORA, ()),
    "chat_template": ("templates from requests are not run; the model's own is used", ()),
    "documents": ("the chat template gets messages only", ([],)),
    "spaces_between_special_tokens": ("text is decoded without added spaces", (True,)),
    "mm_processor_kwargs": ("prompts are text only", ({},)),
    "kv_transfer_params": ("prefill and decode run in one engine", ({},)),
    "vllm_xargs": ("there are no extensions by that name", ({},)),
    "priority": ("requests are served in the order of arrival", (0,)),
}


class _SamplingRequest(BaseModel):
    """What both kinds of request share. Ranges are OpenAI's where OpenAI has the parameter, else vLLM's."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    n: int | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = None
    seed: Seed | None = None
    stop: Stop = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_token_origins: bool | None = None
    speculative: bool | None = None
    # The form of the answer; read by `cluster.http.requests.structured_output`.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: JSONSchema = None
    guided_regex: str | None = None
    guided_choice: Strings = None
    guided_grammar: str | None = None
    json_schema: JSONSchema = None
    regex: str | None = None
    ebnf: str | None = None
    allowed_token_ids: Annotated[list[int], Field(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    stream: bool | None = None
    stream_options: "StreamOptions | None" = None
    request_id: RequestId | None = None
    # Kept by OpenAI for its own accounting; nothing here depends on them.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class StreamOptions(BaseModel):
    """What a stream carries besides the answer.

    include_usage: an event with the usage before the last.
    continuous_usage_stats: the usage in every event.
    include_obfuscation: accepted; events are not padded in any case.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class ChatCompletionRequest(_SamplingRequest):
    """Continue a conversation."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: Literal[False] | None = None
    echo: Literal[False] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(_SamplingRequest):
    """Continue a text."""

    prompt: Prompt = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = None
    include_reasoning: Literal[True] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(BaseModel):
    """The tokens of one of `prompt` and `messages`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """The text of `tokens`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    tokens: TokenIds


def parse_body(raw: bytes, kind: type[Body]) -> Body:
    """The checked request of a JSON body. Raises ApiError (400).

    msgspec's parser refuses what Python's would let through: NaN, Infinity, numbers and nesting without bounds, lone
    surrogates.
    """
    try:
        values = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise invalid(None, f"The request body is not valid JSON: {reason}", "invalid_json") from None
    if not isinstance(values, dict):
        raise invalid(None, "The request body must be a JSON object", "invalid_json")
    _check_sizes(values)
    if issubclass(kind, _SamplingRequest):
        values = _without_refused(values)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise validation_fault(error) from None


def _check_sizes(values: Mapping[str, Any]) -> None:
    """Raises ApiError for what has more elements than any honest request."""
    if len(values) > MAX_PARAMETERS:
        raise invalid(None, f"The request body has {len(values)} parameters; at most {MAX_PARAMETERS} are allowed")
    for name, value in values.items():
        if isinstance(value, dict) and len(value) > MAX_OBJECT_FIELDS:
            raise invalid(name[:100], f"{name[:100]} has {len(value)} entries; at most {MAX_OBJECT_FIELDS} are allowed")
    messages = values.get("messages")
    if not isinstance(messages, list):
        return
    if len(messages) > MAX_MESSAGES:
        raise invalid("messages", f"messages has {len(messages)} entries; at most {MAX_MESSAGES} are allowed")
    for i, message in enumerate(messages):
        if isinstance(message, dict) and len(message) > MAX_MESSAGE_FIELDS:
            raise invalid(
                f"messages[{i}]", f"messages[{i}] has {len(message)} fields; at most {MAX_MESSAGE_FIELDS} are allowed"
            )


def _without_refused(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` without parameters of REFUSED that ask for nothing. Raises ApiError for those that do."""
    kept = {}
    for name, value in values.items():
        if name not in REFUSED:
            kept[name] = value
            continue
        reason, harmless = REFUSED[name]
        if value is not None and value not in harmless:
            raise unsupported(name, reason)
    return kept


def validation_fault(error: ValidationError) -> ApiError:
    """The first fault, or all unknown parameters together."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    unknown = [_path(fault["loc"]) for fault in faults if fault["type"] == "extra_forbidden"]
    if unknown:
        names = ", ".join(name[:100] for name in unknown[:20])
        return invalid(unknown[0][:100], f"Unknown parameter: {names}", "unknown_parameter")
    param = _path(faults[0]["loc"])
    if faults[0]["type"] == "missing":
        return invalid(param, f"Missing required parameter: {param}", "missing_required_parameter")
    message = faults[0]["msg"]
    return invalid(param, f"Invalid value for {param}: {message[0].lower()}{message[1:]}")


def _path(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "role") -> "messages[0].role"."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
