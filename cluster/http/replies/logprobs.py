"""Log-probabilities in OpenAI's two forms: the chat's list of entries and the completions' parallel lists."""

import math

from cluster.http.answer import Piece
from cluster.http.schema.chat_reply import ChatLogprobs, TokenLogprob, TopLogprob
from cluster.http.schema.text_reply import TextLogprobs
from cluster.http.text.tokenizer import ChatTokenizer

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say; vLLM's value


def chat_logprobs(piece: Piece, num_top: int, tokenizer: ChatTokenizer, as_ids: bool) -> ChatLogprobs:
    """One entry per token. as_ids: named by their ids, as vLLM writes them, which no two share."""
    content = []
    for token, entry in zip(piece.tokens, piece.logprobs, strict=True):
        top = zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)
        content.append(
            TokenLogprob(
                token=_text(token, tokenizer, as_ids),
                logprob=_finite(entry.logprob),
                bytes=list(tokenizer.token_bytes(token)),
                top_logprobs=[_top(other, logprob, tokenizer, as_ids) for other, logprob in top],
            )
        )
    return ChatLogprobs(content=content)


def text_logprobs(piece: Piece, num_top: int, tokenizer: ChatTokenizer, as_ids: bool) -> TextLogprobs:
    """Parallel lists; top_logprobs holds the chosen token beside the most likely ones, as OpenAI's does."""
    tops: list[dict[str, float]] = []
    for token, entry in zip(piece.tokens, piece.logprobs, strict=True):
        top = zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)
        # Tokens that are parts of characters can have the same text; the likelier one keeps it.
        named: dict[str, float] = {}
        for other, logprob in (*top, (token, entry.logprob)):
            named.setdefault(_text(other, tokenizer, as_ids), _finite(logprob))
        tops.append(named)
    return TextLogprobs(
        tokens=[_text(token, tokenizer, as_ids) for token in piece.tokens],
        token_logprobs=[_finite(entry.logprob) for entry in piece.logprobs],
        top_logprobs=tops if num_top else None,
        text_offset=piece.offsets,
    )


def _top(token: int, logprob: float, tokenizer: ChatTokenizer, as_ids: bool) -> TopLogprob:
    raw = tokenizer.token_bytes(token)
    return TopLogprob(token=_text(token, tokenizer, as_ids), logprob=_finite(logprob), bytes=list(raw))


def _text(token: int, tokenizer: ChatTokenizer, as_ids: bool) -> str:
    return f"token_id:{token}" if as_ids else tokenizer.token_bytes(token).decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB) if math.isfinite(logprob) else MIN_LOGPROB
