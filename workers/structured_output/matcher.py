"""xgrammar's matcher with what the walks of a tree need beside it."""

import xgrammar
from torch import Tensor


class Matcher:
    """Where one request stands in its grammar. What is tried on top of that can be taken back in one call, wherever an
    exception has cut it short. Its calls release Python's lock, and any may take seconds for a hostile grammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._num_tried = 0

    def take(self, token: int) -> bool:
        """Advance through an emitted token for good; False, and nothing done, where the grammar does not allow it."""
        assert self._num_tried == 0, "a token was taken amid tries"
        return bool(not self._matcher.is_terminated() and self._matcher.accept_token(token))

    def reset(self) -> None:
        """Begin anew."""
        self._matcher.reset()
        self._num_tried = 0

    def accept_token(self, token: int) -> bool:
        """Try a token, if the grammar allows it."""
        is_allowed = bool(self._matcher.accept_token(token))
        self._num_tried += is_allowed
        return is_allowed

    def accept_string(self, text: bytes) -> bool:
        """Try a text, if the grammar allows it; `rollback` counts it as one."""
        is_allowed = bool(self._matcher.accept_string(text))
        self._num_tried += is_allowed
        return is_allowed

    def rollback(self, count: int) -> None:
        """Take back the last `count` tries."""
        self._matcher.rollback(count)
        self._num_tried -= count

    def rewind(self) -> None:
        """Take back all tries."""
        if self._num_tried:
            self.rollback(self._num_tried)

    def fill(self, words: Tensor, row: int = 0) -> None:
        """The tokens that may come next as bits. words: [n, w] int32, of which a row is written."""
        self._matcher.fill_next_token_bitmask(words, row)

    def jump(self) -> bytes:
        """The longest text that must come, byte by byte; it may begin or end inside a character. xgrammar 0.2.8 returns
        it as a str, so that such bytes come with the error."""
        try:
            text: str = self._matcher.find_jump_forward_string()
        except UnicodeDecodeError as error:
            return error.object
        return text.encode()

    def is_terminated(self) -> bool:
        """Whether its end token was taken."""
        return bool(self._matcher.is_terminated())

    def is_completed(self) -> bool:
        """Whether the text may end here."""
        return bool(self._matcher.is_completed())
