"""Replies of SGLang's /generate and /get_model_info."""

from typing import Literal

from msgspec import UNSET, UnsetType

from cluster.http.schema.response import Struct

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
