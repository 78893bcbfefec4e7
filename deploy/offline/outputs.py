"""Parameters and outputs of `LLM` and `AsyncLLM`, named as vLLM's."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from cluster.http.answer import Answer, EngineFailedError, RequestInvalidError
from cluster.http.text.tokenizer import ChatTokenizer
from cluster.transport.messages import TokenDelta
from deploy.offline.engine_thread import EngineDeadError
from workers.scheduling import plan
from workers.scheduling.request import Request


class RequestOutputKind(Enum):
    """What `AsyncLLM.generate` yields: the answer so far, the part since the last output, or only the whole answer."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


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
    output_kind: outputs of `AsyncLLM`.
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
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

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
    finish_reason: "stop", "length", "abort", or None while it runs.
    stop_reason: the stop text, or the id of a stop token other than the end of text.
    acceptance_length: tokens per round with drafts, 1 + accepted / rounds; None without drafts.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
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
    """An answer while it is generated. num_cached_tokens: prompt tokens found in the prefix cache."""

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
        self._is_aborted = False
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[plan.TokenLogprobs] = []
        self._total_logprob = 0.0

    @property
    def is_finished(self) -> bool:
        return self._is_aborted or self._answer.finish is not None

    @property
    def num_cached_tokens(self) -> int:
        return self._answer.cached_tokens or 0

    def push(self, delta: TokenDelta) -> None:
        """Add a step's tokens; a stop text may end the answer before the engine does. Raises ValueError for a request
        that cannot be answered, EngineDeadError if the engine has failed."""
        if delta.finish == "abort":
            self._is_aborted = True
            return
        try:
            piece = self._answer.push(delta)
        except RequestInvalidError as error:
            raise ValueError(f"the request cannot be answered: {error}") from None
        except EngineFailedError as error:
            raise EngineDeadError(str(error)) from None
        self._texts.append(piece.text)
        self._tokens += piece.tokens
        self._logprobs += piece.logprobs
        self._total_logprob += sum(each.logprob for each in piece.logprobs)

    def output(self) -> CompletionOutput:
        """Return the answer so far."""
        answer, speculation = self._answer, self._answer.speculation
        rounds = 0 if speculation is None else speculation.num_rounds
        accepted = 0 if speculation is None else sum(k * times for k, times in enumerate(speculation.histogram))
        wanted = self._params.logprobs is not None
        return CompletionOutput(
            index=self._index,
            text="".join(self._texts),
            token_ids=tuple(self._tokens),
            cumulative_logprob=self._total_logprob if wanted else None,
            logprobs=list(map(self._listed, self._tokens, self._logprobs)) if wanted else None,
            finish_reason="abort" if self._is_aborted else answer.finish,
            stop_reason=answer.stop_reason,
            acceptance_length=1 + accepted / rounds if rounds else None,
        )

    def delta(self) -> CompletionOutput:
        """Return the part since the last call."""
        output = self.output()
        self._texts, self._tokens, self._logprobs = [], [], []
        return output

    def _listed(self, token: int, found: plan.TokenLogprobs) -> dict[int, Logprob]:
        ranks = {id_: rank for rank, id_ in enumerate(found.top_ids, 1)}
        values = {token: found.logprob, **dict(zip(found.top_ids, found.top_logprobs, strict=True))}
        return {id_: Logprob(value, ranks.get(id_), self._tokenizer.token_text(id_)) for id_, value in values.items()}


def request_output(
    request_id: str,
    text: str | None,
    prompt: list[int],
    answers: Sequence[RunningAnswer],
    finished: bool = True,
    kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY,
) -> RequestOutput:
    """Return the output of some answers to a prompt. text: the prompt's, if known. finished: whether all have ended."""
    is_delta = kind is RequestOutputKind.DELTA
    return RequestOutput(
        request_id=request_id,
        prompt=text,
        prompt_token_ids=prompt,
        outputs=[answer.delta() if is_delta else answer.output() for answer in answers],
        num_cached_tokens=answers[0].num_cached_tokens,
        finished=finished,
    )


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
