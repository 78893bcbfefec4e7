"""xgrammar's matcher, with an undo of all tried tokens in one call."""

import xgrammar
from torch import Tensor


class Matcher:
    """The state of one request's grammar, plus tried tokens. `rewind` undoes all tries, also after an exception.

    Calls release the GIL. Any of them may take seconds for a hostile grammar.
    """

    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._num_tried = 0

    def take(self, token: int) -> bool:
        """Advance by an emitted token. Return False, and change nothing, if the grammar does not allow it."""
        assert self._num_tried == 0, "tries must be undone before a token is taken"
        return bool(not self._matcher.is_terminated() and self._matcher.accept_token(token))

    def reset(self) -> None:
        """Return to the start of the grammar."""
        self._matcher.reset()
        self._num_tried = 0

    def accept_token(self, token: int) -> bool:
        """Try a token. Return whether the grammar allows it."""
        is_allowed = bool(self._matcher.accept_token(token))
        self._num_tried += is_allowed
        return is_allowed

    def accept_string(self, text: bytes) -> bool:
        """Try a text. Return whether the grammar allows it. `rollback` counts it as one try."""
        is_allowed = bool(self._matcher.accept_string(text))
        self._num_tried += is_allowed
        return is_allowed

    def rollback(self, count: int) -> None:
        """Undo the last `count` tries."""
        self._matcher.rollback(count)
        self._num_tried -= count

    def rewind(self) -> None:
        """Undo all tries."""
        if self._num_tried:
            self.rollback(self._num_tried)

    def fill(self, words: Tensor, row: int = 0) -> None:
        """Write the mask of the allowed next tokens to `words[row]`. words: [n, w] int32."""
        self._matcher.fill_next_token_bitmask(words, row)

    def jump(self) -> bytes:
        """Return the longest forced text. If it begins or ends inside a character, xgrammar 0.2.8 raises an error that
        contains the bytes."""
        try:
            text: str = self._matcher.find_jump_forward_string()
        except UnicodeDecodeError as error:
            return error.object
        return text.encode()

    def is_terminated(self) -> bool:
        """Return whether an end token was taken."""
        return bool(self._matcher.is_terminated())

    def is_completed(self) -> bool:
        """Return whether the text may end here."""
        return bool(self._matcher.is_completed())
