"""Parameters of a request under vLLM's names, checked as those of HTTP requests are (`aerie.cluster.http.schema`)."""

import copy
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Self, TypeVar

from aerie.cluster.http.config import EdgeConfig
from aerie.cluster.http.errors import ApiError
from aerie.cluster.http.requests.parameters import num_choices, stop_strings
from aerie.cluster.http.schema.body import Refusals, validated, without_refused
from aerie.cluster.http.schema.request import IGNORED, REFUSED, CompletionRequest
from aerie.workers.scheduling.plan import VALUES

logger = logging.getLogger(__name__)
T = TypeVar("T")

# A server's limits of a request, widened: what a user sends to his own process is his.
LIMITS = EdgeConfig(
    max_n=16384,
    max_choices=16384,
    max_prompt_logprobs=2**40,
    max_stop_strings=1024,
    max_stop_length=65536,
    max_grammar_bytes=2**30,
)
# Parameters of vLLM's SamplingParams, beside those that requests over HTTP have, too.
PYTHON_REFUSED: Refusals = {
    name: refusal for name, refusal in REFUSED.items() if name not in ("max_new_tokens", "repeat_penalty")
} | {
    "best_of": ("ask for n answers, and rank them by their cumulative_logprob", ()),
    "guided_decoding": ("use structured_outputs", ()),
    "extra_args": ("there are no extensions that read them", ({},)),
    "flat_logprobs": ("log-probabilities are dictionaries", (False,)),
    "prompt_logprob_token_ids": ("use prompt_logprobs, up to 20 of the likeliest tokens", ([],)),
    "prompt_logprob_start": ("use prompt_logprobs, which has the whole prompt", (0,)),
    "thinking_token_budget": ("it belongs to chats over HTTP", (-1,)),
    "skip_reading_prefix_cache": ("use cache_salt, or LLM(enable_prefix_caching=False)", (False,)),
    "routed_experts_prompt_start": ("which experts ran stays in the engine", (0,)),
    "trace_decode_token_ids": ("tokens are sampled", ([],)),
    "stream_interval": ("a slow reader gets fewer and larger outputs by itself", (1,)),
    "skip_clone": ("it has no effect here", (False, True)),
}


class RequestOutputKind(Enum):
    """What `AsyncLLM.generate` yields: the answer so far, the part since the last output, or only the whole answer."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class StructuredOutputsParams:
    """The form of an answer; exactly one of the first six (docs/structured-output.md).

    json: a JSON schema, as an object or a text.
    choice: the answer is one of these texts.
    grammar: GBNF, whose first rule is `root`.
    json_object: any JSON object.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


def _refuses(cls: type[T]) -> type[T]:
    """Have a dataclass refuse `PYTHON_REFUSED` by name; values without effect are accepted (`honoured`)."""
    init: Callable[..., None] = cls.__init__

    @functools.wraps(init)
    def checked(self: T, **values: Any) -> None:
        init(self, **honoured(values, PYTHON_REFUSED))

    cls.__init__ = checked  # type: ignore[assignment]
    return cls


def _with_values(cls: type[T]) -> type[T]:
    """Add the declared values (`aerie.workers.request_values`) that a dataclass does not name. It names those that
    type checkers and editors should show."""
    for name, value in VALUES.items():
        if name not in cls.__annotations__:
            cls.__annotations__[name] = value.kind
            setattr(cls, name, value.default)
    return cls


@_refuses
@dataclass(kw_only=True)
@_with_values
class SamplingParams:
    """Sampling parameters and the end of an answer. Those that Aerie cannot honour are refused by name.

    n: answers per prompt.
    max_tokens: maximum tokens of an answer; None: as many as the model's length leaves. Never more than that.
    temperature: 0 chooses the most likely token.
    top_k: 0 or -1 switches the filter off.
    seed: None draws one for each answer.
    logit_bias: token id -> bias from -100 to 100.
    allowed_token_ids: all tokens of the answer are of these.
    bad_words: texts that the answer does not contain.
    structured_outputs: the form of the answer.
    stop: texts that end an answer; they are not part of it.
    ignore_eos: continue after the end-of-text token.
    logprobs: return the log-probabilities of each token and of the `logprobs` most likely tokens; up to 20.
    prompt_logprobs: the same for the prompt's tokens.
    truncate_prompt_tokens: keep only that many tokens from the prompt's end.
    detokenize: False leaves the text empty.
    cache_salt: prompts share cached pages only with prompts of the same salt.
    speculative: False decodes without the draft, with the same tokens.
    output_kind: outputs of `AsyncLLM`.

    Raises ValueError that names field, value and rule.
    """

    n: int = 1
    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    cache_salt: str | None = None
    speculative: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self.body()

    def clone(self) -> Self:
        """Return a copy that shares nothing."""
        return copy.deepcopy(self)

    def body(self) -> CompletionRequest:
        """Return these parameters as the body of an HTTP request has them. Raises ValueError; fields may have been set
        since the object was built."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _PYTHON_ONLY}
        form = values["structured_outputs"]
        if isinstance(form, StructuredOutputsParams):
            values["structured_outputs"] = {key: value for key, value in vars(form).items() if value is not None}
        if (bias := values["logit_bias"]) is not None:
            values["logit_bias"] = {str(token): float(value) for token, value in bias.items()}
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            if isinstance(values[name], tuple | set | frozenset):
                values[name] = list(values[name])
        body: CompletionRequest = raised_as_value_error(validated, values, CompletionRequest)
        raised_as_value_error(num_choices, body.n, 1, LIMITS)
        raised_as_value_error(stop_strings, body.stop, LIMITS)
        if body.max_tokens == 0:
            raise ValueError("max_tokens=0: must be at least 1, or None for as many as the model's length leaves")
        return body


_IGNORED = {**IGNORED, "priority": (0,)}  # all requests are the caller's
_PYTHON_ONLY = ("detokenize", "output_kind")


def honoured(values: Mapping[str, Any], refused: Refusals) -> dict[str, Any]:
    """Return `values` without refused and ignored parameters. Those that requests over HTTP ignore too are named once
    in the log if they ask for something. Raises ValueError for refused ones."""
    used = raised_as_value_error(without_refused, values, refused, _IGNORED)
    for name in used.keys() & _IGNORED.keys():
        del used[name]
        _log_ignored(name)
    return used


@functools.cache
def _log_ignored(name: str) -> None:
    logger.warning("%s has no effect here and is ignored", name)


def raised_as_value_error(work: Callable[..., T], *arguments: Any) -> T:
    """Return work(*given), an API's validation; its ApiError becomes a ValueError."""
    try:
        return work(*arguments)
    except ApiError as error:
        raise ValueError(error.message) from None


def checked_params(params: Any) -> SamplingParams:
    """Return the parameters of a prompt. Raises TypeError."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params: must be SamplingParams, or a list of them, not {params!r:.80}")
    return params
