"""Formats log-probabilities: OpenAI's list of entries for chats, its parallel lists for completions, and vLLM's format
for prompts."""

import math
from collections.abc import Iterable, Sequence

from aerie.cluster.http.answer import Piece, PromptScores, TokenScore
from aerie.cluster.http.schema.completions import ChatLogprobs, TextLogprobs, TokenLogprob, TopLogprob
from aerie.cluster.http.schema.response import PromptToken
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.workers.scheduling.plan import TokenLogprobs

MIN_LOGPROB = -9999.0  # in place of minus infinity, which JSON does not have; as in vLLM


class LogprobFormats:
    """Log-probabilities in the formats of OpenAI's routes.

    as_ids: write tokens as their unique ids, in vLLM's format.
    """

    def __init__(self, tokenizer: ChatTokenizer, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def chat(self, piece: Piece, num_top: int) -> ChatLogprobs:
        """Return one entry per token."""
        content = []
        for token, entry in zip(piece.tokens, piece.logprobs, strict=True):
            top = [TopLogprob(*self._entry(other, logprob)) for other, logprob in _top(entry, num_top)]
            content.append(TokenLogprob(*self._entry(token, entry.logprob), top_logprobs=top))
        return ChatLogprobs(content=content)

    def text(self, piece: Piece, num_top: int, begin: int = 0) -> TextLogprobs:
        """Return parallel lists. As in OpenAI's API, top_logprobs has the chosen token beside the most likely ones.

        begin: offset of the answer in the choice's text.
        """
        entries = zip(piece.tokens, piece.logprobs, strict=True)
        return TextLogprobs(
            tokens=[self._text(token) for token in piece.tokens],
            token_logprobs=[finite(entry.logprob) for entry in piece.logprobs],
            top_logprobs=[self._named(token, entry, num_top) for token, entry in entries],
            text_offset=[begin + offset for offset in piece.offsets],
        )

    def echo(self, prompt: Sequence[int], scores: PromptScores, echo: str, num_top: int) -> TextLogprobs:
        """Return the log-probabilities of a prompt, whose text is `echo`."""
        entries = list(zip(prompt[1:], scores, strict=True))
        return TextLogprobs(
            tokens=[self._text(token) for token in prompt],
            token_logprobs=[None, *(finite(score.logprob) for _, score in entries)],
            top_logprobs=[None, *(self._named(token, score, num_top) for token, score in entries)],
            text_offset=self._offsets(prompt, echo),
        )

    def prompt(self, prompt: Sequence[int], scores: PromptScores, num_top: int) -> list[dict[str, PromptToken] | None]:
        """Return vLLM's format: for each position the prompt's own token, then the most likely ones."""
        places: list[dict[str, PromptToken] | None] = [None]
        for token, score in zip(prompt[1:], scores, strict=True):
            entry = {str(token): self._prompt_token(token, score.logprob, score.rank)}
            for rank, (other, logprob) in enumerate(_top(score, num_top), 1):
                entry.setdefault(str(other), self._prompt_token(other, logprob, rank))
            places.append(entry)
        return places

    def _entry(self, token: int, logprob: float) -> tuple[str, float, list[int]]:
        return self._text(token), finite(logprob), list(self._tokenizer.token_bytes(token))

    def _prompt_token(self, token: int, logprob: float, rank: int) -> PromptToken:
        return PromptToken(finite(logprob), rank, self._tokenizer.token_text(token))

    def _named(self, token: int, entry: TokenLogprobs | TokenScore, num_top: int) -> dict[str, float]:
        """Return the log-probabilities of the most likely tokens and of `token`, by their text."""
        # Tokens that are parts of characters can have the same text; the entry is the likeliest one's.
        named: dict[str, float] = {}
        for other, logprob in (*_top(entry, num_top), (token, entry.logprob)):
            named.setdefault(self._text(other), finite(logprob))
        return named

    def _offsets(self, prompt: Sequence[int], echo: str) -> list[int]:
        """Return the offset of each token's text in `echo`, which has all special tokens or none. A token without text
        has the offset of the next one."""
        offsets: list[int] = []
        for skips in (True, False):
            detokenizer, offsets, length = self._tokenizer.detokenizer(skip_special_tokens=skips), [], 0
            for token in prompt:
                offsets.append(length)
                length += len(detokenizer.step(token))
            added = length + len(detokenizer.flush()) - len(echo)
            if added == 0:
                break
        return [max(0, offset - max(0, added)) for offset in offsets]

    def _text(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token_text(token)


def joined_logprobs(first: TextLogprobs, second: TextLogprobs) -> TextLogprobs:
    """Return the lists of both, joined."""
    return TextLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


def _top(entry: TokenLogprobs | TokenScore, num_top: int) -> Iterable[tuple[int, float]]:
    """Return the most likely tokens and their log-probabilities."""
    return zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)


def finite(logprob: float) -> float:
    """Return `logprob`, or `MIN_LOGPROB` for minus infinity."""
    return max(logprob, MIN_LOGPROB) if math.isfinite(logprob) else MIN_LOGPROB
