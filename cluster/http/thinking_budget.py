"""Ends an answer's thinking after a number of tokens: vLLM's `thinking_token_budget`.

The engine does not know about thinking. When the budget is used up, the generation is aborted, the closing mark of
thinking is appended to the tokens so far, and a new generation continues from there. The prefix cache makes this cheap.
"""

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from aerie.cluster.http.parsers.reasoning import ReasoningReader
from aerie.cluster.transport.messages import TokenDelta
from aerie.workers.scheduling.plan import TokenLogprobs


@dataclass(frozen=True)
class ThinkingBudget:
    """limit: maximum tokens of thinking, without marks.
    closing: tokens of the mark that ends it.
    """

    limit: int
    closing: tuple[int, ...]


async def within_budget(
    generate: Callable[[Sequence[int]], AsyncGenerator[TokenDelta, None]],
    budget: ThinkingBudget,
    thinking: ReasoningReader,
    logprobs: bool,
) -> AsyncGenerator[TokenDelta, None]:
    """Yield the deltas of one answer, token by token while it may think.

    generate: generates what follows the given tokens.
    thinking: the caller updates it with each delta, before it takes the next one.
    logprobs: whether deltas have them; the mark's, which was not sampled, are 0.
    """
    output: list[int] = []
    num_thought = 0

    def is_spent() -> bool:
        return thinking.is_inside and num_thought >= budget.limit

    while True:
        if is_spent():
            yield _forced(budget.closing, logprobs)
            output += budget.closing
        async with contextlib.aclosing(generate(output)) as deltas:
            async for delta in deltas:
                for part in _parts(delta, thinking):
                    num_thought += thinking.is_inside and bool(part.tokens)
                    output += part.tokens
                    yield part
                    if part.finish is not None:
                        return
                    if is_spent():
                        break
                if is_spent():
                    break
            else:
                return


def _parts(delta: TokenDelta, thinking: ReasoningReader) -> Iterator[TokenDelta]:
    """Yield `delta` token by token while the answer may think. The last part keeps the fields of a last delta."""
    while len(delta.tokens) > 1 and thinking.is_possible:
        yield TokenDelta(
            delta.request_id,
            delta.tokens[:1],
            logprobs=None if delta.logprobs is None else delta.logprobs[:1],
            prompt_logprobs=delta.prompt_logprobs,
            attempt=delta.attempt,
            drafted=delta.drafted[:1],
        )
        delta = msgspec.structs.replace(
            delta,
            tokens=delta.tokens[1:],
            logprobs=None if delta.logprobs is None else delta.logprobs[1:],
            prompt_logprobs=(),
            drafted=delta.drafted[1:],
        )
    yield delta


def _forced(tokens: tuple[int, ...], logprobs: bool) -> TokenDelta:
    each = tuple(TokenLogprobs(0.0) for _ in tokens) if logprobs else None
    return TokenDelta("", tokens, logprobs=each, drafted=(False,) * len(tokens))
