"""An `EngineClient` that follows a script, and a small byte-level tokenizer, for tests of the HTTP edge."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from aerie.cluster.http.engine_client import EngineRefused
from aerie.cluster.http.text.chat_template import ChatTemplate
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.cluster.transport.messages import EngineStats, FlushOutcome, Refusal, TokenDelta
from aerie.workers.prompt_inputs import PromptInputs
from aerie.workers.scheduling.plan import PromptLogprobs, SamplingParams, TokenLogprobs, pack_i32
from aerie.workers.scheduling.request import Owner

EOS = "<|im_end|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# A script's steps: a delta to emit, seconds to wait, or an exception to raise.
Step = TokenDelta | float | Exception
Script = Callable[[list[int], SamplingParams], Iterable[Step]]


@dataclass(frozen=True)
class Call:
    prompt: list[int]
    sampling: SamplingParams
    request_id: str
    running_stats: bool = False
    token_origins: bool = False
    output: tuple[int, ...] = ()
    owner: Owner = Owner()  # noqa: RUF009 - immutable
    inputs: PromptInputs | None = None


@dataclass
class FakeEngine:
    """Implements `aerie.cluster.http.engine_client.EngineClient`.

    script: the deltas of each call.
    calls: what was asked.
    closed: ids of requests that ended before their last delta, which a real engine aborts.
    num_active: requests whose generators are open.
    fault: why no request gets through, see `health`.
    known_adapters: folders of LoRA adapters by name.
    flushes: what each further flush of the prefix cache answers; with none left, it is busy while a generator is open.
    """

    script: Script
    engines: list[EngineStats] = field(default_factory=lambda: [EngineStats(engine_id="engine-0", status="ready")])
    calls: list[Call] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    num_active: int = 0
    max_active: int = 0
    flushes: list[list[FlushOutcome]] = field(default_factory=list)
    fault: str = ""
    known_adapters: dict[str, str] = field(default_factory=dict)

    def adapters(self) -> dict[str, str]:
        return self.known_adapters

    async def generate(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        request_id: str,
        running_stats: bool = False,
        token_origins: bool = False,
        output: Sequence[int] = (),
        owner: Owner = Owner(),  # noqa: B008 - immutable
        inputs: PromptInputs | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        assert request_id not in {call.request_id for call in self.calls}, "request ids must be unique"
        self.calls.append(
            Call(prompt, sampling, request_id, running_stats, token_origins, tuple(output), owner, inputs)
        )
        self.num_active += 1
        self.max_active = max(self.max_active, self.num_active)
        finished = False
        try:
            for step in self.script([*prompt, *output], sampling):
                if isinstance(step, float):
                    await asyncio.sleep(step)
                elif isinstance(step, Exception):
                    finished = True
                    raise step
                else:
                    finished = step.finish is not None
                    yield step
        finally:
            self.num_active -= 1
            if not finished:
                self.closed.append(request_id)

    async def stats(self) -> list[EngineStats]:
        return self.engines

    async def health(self) -> tuple[list[EngineStats], str]:
        return self.engines, self.fault

    async def flush_cache(self) -> list[FlushOutcome]:
        if self.flushes:
            return self.flushes.pop(0)
        unfinished = f"{self.num_active} requests run and 0 wait" if self.num_active else ""
        return [FlushOutcome(engine.engine_id, unfinished=unfinished) for engine in self.engines]


def small_tokenizer() -> Tokenizer:
    """Byte-level: a token for each of the 256 bytes, a few merges, three special tokens and one added plain one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("l", "l"),
        ("ll", "o"),
        ("h", "e"),
        ("he", "llo"),
        ("Ġ", "w"),
        ("o", "r"),
        ("Ġw", "or"),
        ("l", "d"),
        ("Ġwor", "ld"),
        ("Ã", "¤"),
    ]
    vocab = {token: i for i, token in enumerate(alphabet)}
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", EOS])
    tokenizer.add_tokens(["<think me>"])
    return tokenizer


def small_tokens(text: str) -> tuple[int, ...]:
    """The token ids of `small_tokenizer`."""
    return tuple(small_tokenizer().encode(text, add_special_tokens=False).ids)


def chat_tokenizer() -> ChatTokenizer:
    tokenizer = small_tokenizer()
    return ChatTokenizer(tokenizer, ChatTemplate(CHATML, {"eos_token": EOS}), (tokenizer.token_to_id(EOS),))


def says(
    *texts: str, finish: str = "stop", delay_s: float = 0.0, tokenizer: Tokenizer | None = None, **last: object
) -> Script:
    """A script with one delta per text; "stop" adds the end-of-sequence token to the last one. last: further fields of
    the last delta. Log-probabilities are there if the request wants them."""
    tokenizer = tokenizer or small_tokenizer()
    eos = tokenizer.token_to_id(EOS)

    def script(prompt: list[int], sampling: SamplingParams) -> Iterable[Step]:
        yield from prompt_deltas(prompt, sampling)
        for i, text in enumerate(texts):
            at_end = i == len(texts) - 1
            tokens = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
            if at_end and finish == "stop":
                tokens += (eos,)
            extra = last if at_end else {}
            if delay_s:
                yield delay_s
            yield TokenDelta(
                request_id="",
                tokens=tokens,
                finish=finish if at_end else None,
                logprobs=logprobs_of(tokens, sampling),
                **extra,  # type: ignore[arg-type]
            )

    return script


def logprobs_of(tokens: tuple[int, ...], sampling: SamplingParams) -> tuple[TokenLogprobs, ...] | None:
    """Token t has log-probability -t / 100; the most likely others are t + 1, t + 2, ..."""
    if sampling.logprobs < 0:
        return None
    others = range(sampling.logprobs)
    return tuple(
        TokenLogprobs(-token / 100, tuple((token + k) % 256 for k in others), tuple(-(token + k) / 100 for k in others))
        for token in tokens
    )


def prompt_deltas(prompt: list[int], sampling: SamplingParams, chunk: int = 3) -> Iterable[TokenDelta]:
    """Log-probabilities of a prompt, if they are asked for, as `logprobs_of` has them; each token's rank is its own
    number. The last token of a chunk comes again with the next one, as after a preemption."""
    k = sampling.prompt_logprobs
    if k < 0:
        return
    for begin in range(1, len(prompt), chunk):
        start = max(1, begin - 1)
        tokens = prompt[start : begin + chunk]
        others = [[(token + j) % 256 for j in range(k)] for token in tokens]
        yield TokenDelta(
            request_id="",
            tokens=(),
            prompt_logprobs=(
                PromptLogprobs(
                    start,
                    _f32([-token / 100 for token in tokens]),
                    pack_i32(tokens),
                    pack_i32(sum(others, [])),
                    _f32([-(token + j) / 100 for token in tokens for j in range(k)]),
                ),
            ),
        )


def _f32(values: list[float]) -> bytes:
    return np.asarray(values, "<f4").tobytes()


def refuses(kind: str, message: str = "no", retry_after_s: float = 1.0) -> Script:
    return lambda prompt, sampling: [EngineRefused(Refusal(kind, message, retry_after_s))]
