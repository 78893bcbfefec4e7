"""Parameters and outputs of `deploy.offline.LLM`, named as in vLLM's `LLM`."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.http.answer import Answer
from cluster.http.text.tokenizer import ChatTokenizer
from cluster.transport.messages import TokenDelta
from workers.scheduling import plan
from workers.scheduling.request import Request
from workers.scheduling.request import RequestOutput as StepOutput


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters and the end of an answer. vLLM's other parameters are refused.

    n: answers per prompt.
    max_tokens: maximum tokens of an answer.
    temperature: 0 chooses the most likely token.
    top_k: 0 or -1 switches the filter off.
    seed: None draws one for each answer.
    stop: texts that end an answer; they are not part of it.
    ignore_eos: continue after the end-of-text token.
    logprobs: return the log-probabilities of each token and of the `logprobs` most likely tokens.
    speculative: False decodes without the draft, with the same tokens.
    """

    n: int = 1
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    skip_special_tokens: bool = True
    speculative: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError that names field, value and rule."""
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                limit = f"from {low:g} to {high:g}" if high < _MANY else f"at least {low:g}"
                raise ValueError(f"{name}={value}: must be {limit}")
        if not all(self.stops):
            raise ValueError("stop: an empty text would end every answer at once")

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def of_engine(self, eos_token_ids: Sequence[int], index: int) -> plan.SamplingParams:
        """Return the engine's parameters for answer `index` to a prompt."""
        ends = () if self.ignore_eos else tuple(eos_token_ids)
        seed = random.getrandbits(64) if self.seed is None else (self.seed + index) % 2**64
        return plan.SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=max(0, self.top_k),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=dict(self.logit_bias),
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(dict.fromkeys((*self.stop_token_ids, *ends))),
            logprobs=-1 if self.logprobs is None else self.logprobs,
            speculative=self.speculative,
        )


_MANY = 2**31
_RANGES = (
    ("n", 1, _MANY),
    ("max_tokens", 1, _MANY),
    ("temperature", 0.0, 1e4),
    ("top_p", 0.0, 1.0),
    ("top_k", -1, _MANY),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 1e-6, 1e3),
    ("min_tokens", 0, _MANY),
    ("logprobs", 0, 20),
)


@dataclass(frozen=True)
class Logprob:
    """One token's log-probability in nats, its rank if it is among the most likely ones (1 is the first), and its
    text."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One answer.

    token_ids: tokens, including the one that ended the answer.
    logprobs: for each token, by token id; the chosen token first.
    finish_reason: "stop" or "length".
    stop_reason: the stop text, or the id of a stop token other than the end of text.
    acceptance_length: tokens per round with drafts, 1 + accepted / rounds; None without drafts.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    stop_reason: str | int | None
    acceptance_length: float | None


@dataclass(frozen=True)
class RequestOutput:
    """The answers to one prompt. prompt: its text, None if it was given as token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    finished: bool = True


class RunningAnswer:
    """A running answer."""

    def __init__(
        self, request_id: str, prompt: list[int], params: SamplingParams, index: int, tokenizer: ChatTokenizer
    ) -> None:
        eos = tokenizer.eos_token_ids
        self.request = Request(request_id, prompt, params.of_engine(tuple(eos), index))
        self._params = params
        self._index = index
        self._tokenizer = tokenizer
        self._answer = Answer(
            tokenizer.detokenizer(params.skip_special_tokens, prompt),
            params.stops,
            params.include_stop_str_in_output,
            params.min_tokens,
            frozenset(eos),
        )
        self._texts: list[str] = []
        self._logprobs: list[plan.TokenLogprobs] = []

    def push(self, output: StepOutput) -> bool:
        """Append a step's tokens; return whether a stop text has ended the answer before the engine has."""
        finish = None if output.finish_reason is None else str(output.finish_reason)
        delta = TokenDelta(self.request.request_id, tuple(output.tokens), finish, output.logprobs)
        piece = self._answer.push(delta)
        self._texts.append(piece.text)
        self._logprobs += piece.logprobs
        return self._answer.finish is not None and finish is None

    def output(self) -> CompletionOutput:
        """Return the finished answer."""
        answer, request = self._answer, self.request
        tokens = tuple(request.output[: answer.num_tokens])
        rounds = sum(request.acceptance_histogram)
        accepted = sum(k * times for k, times in enumerate(request.acceptance_histogram))
        wanted = self._params.logprobs is not None
        return CompletionOutput(
            index=self._index,
            text="".join(self._texts),
            token_ids=tokens,
            cumulative_logprob=sum(each.logprob for each in self._logprobs) if wanted else None,
            logprobs=[self._listed(*each) for each in zip(tokens, self._logprobs, strict=True)] if wanted else None,
            finish_reason=str(answer.finish),
            stop_reason=answer.stop_reason,
            acceptance_length=1 + accepted / rounds if rounds else None,
        )

    def _listed(self, token: int, found: plan.TokenLogprobs) -> dict[int, Logprob]:
        ranks = {id_: rank for rank, id_ in enumerate(found.top_ids, 1)}
        values = {token: found.logprob, **dict(zip(found.top_ids, found.top_logprobs, strict=True))}
        return {id_: Logprob(value, ranks.get(id_), self._tokenizer.token_text(id_)) for id_, value in values.items()}


def prompt_of(given: Any) -> tuple[str | None, list[int] | None]:
    """Return the text and token ids of a prompt of `LLM.generate`; one of them is None. Raises TypeError."""
    if isinstance(given, str):
        return given, None
    if isinstance(given, Mapping):
        if set(given) == {"prompt"} and isinstance(given["prompt"], str):
            return given["prompt"], None
        if set(given) == {"prompt_token_ids"}:
            return None, [int(token) for token in given["prompt_token_ids"]]
    elif is_token_ids(given):
        return None, list(given)
    raise TypeError(
        f'prompt {given!r:.80}: must be a text, a list of token ids, {{"prompt": text}} or {{"prompt_token_ids": ids}}'
    )


def is_token_ids(given: Any) -> bool:
    """Whether this is a list of token ids, which is one prompt."""
    return isinstance(given, Sequence) and bool(given) and all(type(token) is int for token in given)
