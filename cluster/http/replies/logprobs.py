"""Formats log-probabilities: OpenAI's list of entries for chats, its parallel lists for completions, and vLLM's format
for prompts."""

import math
from collections.abc import Iterable, Sequence

from cluster.http.answer import Piece
from cluster.http.prompt_scores import PromptScores, TokenScore
from cluster.http.schema.completions import ChatLogprobs, TextLogprobs, TokenLogprob, TopLogprob
from cluster.http.schema.response import PromptToken
from cluster.http.text.tokenizer import ChatTokenizer
from workers.scheduling.plan import TokenLogprobs

MIN_LOGPROB = -9999.0  # in place of minus infinity, which JSON does not have; as in vLLM


def chat_logprobs(piece: Piece, num_top: int, tokenizer: ChatTokenizer, as_ids: bool) -> ChatLogprobs:
    """Return one entry per token. as_ids: write tokens as their unique ids, in vLLM's format."""
    content = []
    for token, entry in zip(piece.tokens, piece.logprobs, strict=True):
        top = zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)
        content.append(
            TokenLogprob(
                token=_text(token, tokenizer, as_ids),
                logprob=finite(entry.logprob),
                bytes=list(tokenizer.token_bytes(token)),
                top_logprobs=[_top(other, logprob, tokenizer, as_ids) for other, logprob in top],
            )
        )
    return ChatLogprobs(content=content)


def text_logprobs(piece: Piece, num_top: int, tokenizer: ChatTokenizer, as_ids: bool, begin: int = 0) -> TextLogprobs:
    """Return parallel lists. As in OpenAI's API, top_logprobs has the chosen token beside the most likely ones.

    begin: offset of the answer in the choice's text.
    """
    tops: list[dict[str, float] | None] = [
        _named(token, entry, num_top, tokenizer, as_ids)
        for token, entry in zip(piece.tokens, piece.logprobs, strict=True)
    ]
    return TextLogprobs(
        tokens=[_text(token, tokenizer, as_ids) for token in piece.tokens],
        token_logprobs=[finite(entry.logprob) for entry in piece.logprobs],
        top_logprobs=tops,
        text_offset=[begin + offset for offset in piece.offsets],
    )


def echo_logprobs(
    prompt: Sequence[int], scores: PromptScores, echo: str, num_top: int, tokenizer: ChatTokenizer, as_ids: bool
) -> TextLogprobs:
    """Return the log-probabilities of a prompt, whose text is `echo`."""
    logprobs: list[float | None] = [None]
    tops: list[dict[str, float] | None] = [None]
    for token, score in zip(prompt[1:], scores, strict=True):
        logprobs.append(finite(score.logprob))
        tops.append(_named(token, score, num_top, tokenizer, as_ids))
    return TextLogprobs(
        tokens=[_text(token, tokenizer, as_ids) for token in prompt],
        token_logprobs=logprobs,
        top_logprobs=tops,
        text_offset=_offsets(prompt, echo, tokenizer),
    )


def joined_logprobs(first: TextLogprobs, second: TextLogprobs) -> TextLogprobs:
    """Return the lists of both, joined."""
    return TextLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


def prompt_logprobs(
    prompt: Sequence[int], scores: PromptScores, num_top: int, tokenizer: ChatTokenizer
) -> list[dict[str, PromptToken] | None]:
    """Return vLLM's format: for each position the prompt's own token, then the most likely ones."""
    places: list[dict[str, PromptToken] | None] = [None]
    for token, score in zip(prompt[1:], scores, strict=True):
        place = {str(token): _prompt_token(token, score.logprob, score.rank, tokenizer)}
        best = zip(score.top_ids[:num_top], score.top_logprobs[:num_top], strict=True)
        for rank, (other, logprob) in enumerate(best, 1):
            place.setdefault(str(other), _prompt_token(other, logprob, rank, tokenizer))
        places.append(place)
    return places


def _prompt_token(token: int, logprob: float, rank: int, tokenizer: ChatTokenizer) -> PromptToken:
    return PromptToken(finite(logprob), rank, _text(token, tokenizer, as_ids=False))


def _named(
    token: int, entry: TokenLogprobs | TokenScore, num_top: int, tokenizer: ChatTokenizer, as_ids: bool
) -> dict[str, float]:
    """Return the log-probabilities of the most likely tokens and of `token`, by their text."""
    top: Iterable[tuple[int, float]] = zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)
    # Tokens that are parts of characters can have the same text; the entry is that of the most likely one.
    named: dict[str, float] = {}
    for other, logprob in (*top, (token, entry.logprob)):
        named.setdefault(_text(other, tokenizer, as_ids), finite(logprob))
    return named


def _offsets(prompt: Sequence[int], echo: str, tokenizer: ChatTokenizer) -> list[int]:
    """Return the offset of each token's text in `echo`, which has all special tokens or none. A token without text has
    the offset of the next one."""
    offsets: list[int] = []
    for skips in (True, False):
        detokenizer, offsets, length = tokenizer.detokenizer(skip_special_tokens=skips), [], 0
        for token in prompt:
            offsets.append(length)
            length += len(detokenizer.step(token))
        added = length + len(detokenizer.flush()) - len(echo)
        if added == 0:
            break
    return [max(0, offset - max(0, added)) for offset in offsets]


def _top(token: int, logprob: float, tokenizer: ChatTokenizer, as_ids: bool) -> TopLogprob:
    raw = tokenizer.token_bytes(token)
    return TopLogprob(token=_text(token, tokenizer, as_ids), logprob=finite(logprob), bytes=list(raw))


def _text(token: int, tokenizer: ChatTokenizer, as_ids: bool) -> str:
    return f"token_id:{token}" if as_ids else tokenizer.token_text(token)


def finite(logprob: float) -> float:
    """Return `logprob`, or `MIN_LOGPROB` for minus infinity."""
    return max(logprob, MIN_LOGPROB) if math.isfinite(logprob) else MIN_LOGPROB
