"""Requests to SGLang's /generate: a prompt, and sampling parameters under SGLang's names. Replies of /generate and
/get_model_info."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, UnsetType
from pydantic import Field, Tag

from aerie.cluster.http.schema.body import Schema, object_or_list
from aerie.cluster.http.schema.request import (
    OTHER_SAMPLERS,
    REFUSED,
    CommonSampling,
    JSONSchema,
    RequestId,
    Strings,
    TokenIds,
    with_values,
)
from aerie.cluster.http.schema.response import Struct
from aerie.workers.scheduling.plan import VALUES

DEFAULT_NEW_TOKENS = 128  # SGLang's
VALUE_NAMES = {name: value.generate_name for name, value in VALUES.items() if value.generate_name}


@with_values(VALUE_NAMES)
class NativeSampling(CommonSampling):
    """`sampling_params`."""

    refused = {name: REFUSED[name] for name in OTHER_SAMPLERS} | {
        "stop_regex": ("use stop, or structured_outputs with a regex on /v1/completions", ()),
        "custom_params": ("code from requests is not run", ({},)),
        "spaces_between_special_tokens": ("text is decoded without added spaces", (True,)),
    }

    max_new_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    no_stop_trim: bool | None = None
    n: int | None = None
    json_schema: JSONSchema = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: Any = None


class NativeRequest(Schema):
    """Continue a text, given by either `text` or `input_ids`. A list of prompts gets a list of answers.

    sampling_params: for all prompts, or a list with one entry per prompt.
    logprob_start_len: with return_logprob, the first prompt token whose log-probability is returned; -1: none."""

    refused = {
        "input_embeds": ("prompts are text or token ids", ()),
        "image_data": ("prompts are text only", ()),
        "audio_data": ("prompts are text only", ()),
        "video_data": ("prompts are text only", ()),
        "lora_path": ("name the adapter as `model` of /v1/completions", ()),
        "custom_logit_processor": ("code from requests is not run", ()),
        "return_hidden_states": ("hidden states stay in the engine", (False,)),
        "token_ids_logprob": ("use top_logprobs_num", ()),
        "session_params": ("send the whole text; the prefix cache finds its beginning", ({},)),
    }

    text: str | Strings = None
    input_ids: TokenIds | None = None
    sampling_params: (
        Annotated[
            Annotated[NativeSampling, Tag("<object>")] | Annotated[list[NativeSampling], Tag("<list>")],
            object_or_list(),
        ]
        | None
    ) = None
    stream: bool | None = None
    return_logprob: bool | None = None
    top_logprobs_num: Annotated[int, Field(ge=0, le=20)] | None = None
    return_text_in_logprobs: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    rid: RequestId | None = None
    log_metrics: bool | None = None  # without effect


# Log-probability (null for a prompt's first token), token id, and the token's text if requested.
NamedLogprob = tuple[float | None, int, str | None]


class NativeFinish(Struct):
    """matched: the stop string or the token that ended the answer. length: number of tokens, if the answer ended at
    max_new_tokens."""

    type: Literal["stop", "length"]
    matched: str | int | None | UnsetType = UNSET
    length: int | UnsetType = UNSET


class NativeMeta(Struct):
    """e2e_latency: seconds from the request to this event.
    spec_verify_ct: rounds that verified drafts. spec_draft_token_num: tokens drafted in them. spec_accept_token_num:
    drafted tokens that were accepted. spec_accept_length: tokens per round. Absent without a draft.
    """

    id: str
    finish_reason: NativeFinish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float
    output_token_logprobs: list[NamedLogprob] | UnsetType = UNSET
    output_top_logprobs: list[list[NamedLogprob]] | UnsetType = UNSET
    input_token_logprobs: list[NamedLogprob] | UnsetType = UNSET
    input_top_logprobs: list[list[NamedLogprob] | None] | UnsetType = UNSET
    spec_verify_ct: int | UnsetType = UNSET
    spec_draft_token_num: int | UnsetType = UNSET
    spec_accept_token_num: int | UnsetType = UNSET
    spec_accept_length: float | UnsetType = UNSET


class NativeAnswer(Struct):
    """An answer; a stream's event has the part so far. index: set if a request has several answers."""

    text: str
    output_ids: list[int]
    meta_info: NativeMeta
    index: int | UnsetType = UNSET


class NativeModel(Struct):
    """The model information that SGLang's clients request first."""

    model_path: str
    tokenizer_path: str
    is_generation: Literal[True] = True
    max_model_len: int = 0
