"""Makes control tokens in users' texts plain text, although a chat template joins these texts with its own control
tokens; and counts the tokens of long texts piece by piece.

Before rendering, characters of users' texts that could start a control token are marked with a character that no text
has. The marks are removed from the rendered text; `ChatText.marks` has their positions. `ChatTokenizer.encode` makes no
control token of a span with a mark.

Encoding a text takes hundreds of bytes of memory per token, so a text that is too long is never encoded as a whole. A
cut may split a token, so the sum over pieces is slightly too large.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

# U+FDD0 to U+FDEF are noncharacters, which ordinary texts do not contain. One that no text of the request has is used.
MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
# Roles whose texts the application or the model writes: tags that are not special tokens (<think>, <tool_call>) keep
# their meaning in them.
TRUSTED_ROLES = frozenset({"system", "developer", "assistant"})
ROLES = TRUSTED_ROLES | {"user", "tool"}
Change = Callable[[str, "ControlTexts", bool], str]  # arguments: text, control tokens, whether at its edges
_TAG = re.compile(r"<\S.*>|\[\S.*\]")  # other added tokens are words or spaces, which users' texts may contain


@dataclass(frozen=True)
class ChatText:
    """A rendered chat.

    marks: ascending positions of characters that are not part of a control token.
    """

    text: str
    marks: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.text)

    def part(self, start: int, end: int) -> "ChatText":
        """Return a slice."""
        first, last = bisect_left(self.marks, start), bisect_left(self.marks, end)
        return ChatText(self.text[start:end], tuple(mark - start for mark in self.marks[first:last]))

    def replaced(self, old: str, new: str) -> "ChatText":
        """Return the chat with a template's texts `old` replaced; a user's keep their marks."""
        pieces, marks, start, shift, index = list[str](), list[int](), 0, 0, self.text.find(old)
        while index >= 0:
            end = index + len(old)
            if not self.is_marked(index, end):
                marks += (mark + shift for mark in self.marks[bisect_left(self.marks, start) :] if mark < index)
                pieces += (self.text[start:index], new)
                start, shift = end, shift + len(new) - len(old)
            index = self.text.find(old, end)
        marks += (mark + shift for mark in self.marks[bisect_left(self.marks, start) :])
        return ChatText("".join([*pieces, self.text[start:]]), tuple(marks))

    def is_marked(self, start: int, end: int) -> bool:
        """Whether a span contains a mark."""
        index = bisect_left(self.marks, start)
        return index < len(self.marks) and self.marks[index] < end


def is_tag(text: str) -> bool:
    """Return whether an added token that is not special is a part of the chat format, such as <tool_call>."""
    return _TAG.fullmatch(text) is not None


class ControlTexts:
    """Finds control tokens, and their starts and ends, in a user's text.

    texts: texts of the tokens.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        unique = frozenset(filter(None, texts))
        # A lookahead does not consume the characters after the first one, so that overlapping tokens are found too.
        branches = [f"{re.escape(first)}(?={_any_of(rests)})" for first, rests in _by_first(unique).items()]
        self._whole = re.compile("|".join(branches)) if branches else None
        self._longest = max(map(len, unique), default=0)
        self._firsts, self._lasts = {text[0] for text in unique}, {text[-1] for text in unique}
        self._beginnings = frozenset(text[:end] for text in unique for end in range(1, len(text)))
        self._ends = frozenset(text[start:] for text in unique for start in range(1, len(text)))
        self._middles = "\n".join(sorted(unique))

    def places(self, text: str, edges: bool) -> list[int]:
        """Return indexes of characters to mark, so that no control token contains a part of `text`. edges: also
        consider tokens that adjacent text might complete."""
        if self._whole is None or not text:
            return []
        starts = {match.start() for match in self._whole.finditer(text)}
        shown = text.strip() if edges else ""  # templates strip
        if not shown:
            return sorted(starts)
        first = len(text) - len(text.lstrip())
        last = first + len(shown) - 1
        tail, head = shown[-self._longest :], shown[: self._longest]
        if any(tail[i:] in self._beginnings for i, letter in enumerate(tail) if letter in self._firsts):
            starts.add(last)
        if any(head[: i + 1] in self._ends for i, letter in enumerate(head) if letter in self._lasts):
            starts.add(first)
        if len(shown) < self._longest and shown in self._middles:
            starts.add(last)
        return sorted(starts)


def marked(
    messages: Sequence[Mapping[str, Any]],
    others: Sequence[Any],
    special: ControlTexts,
    special_or_tags: ControlTexts,
) -> tuple[list[dict[str, Any]], list[Any], str]:
    """Return messages and other values (tools, variables) with marks in their texts, and the mark, "" if none is
    needed.

    Raises ValueError if the texts contain all of `MARKS`.
    """

    def changed(change: Change) -> tuple[list[dict[str, Any]], list[Any]]:
        return [
            _message(message, special if message.get("role") in TRUSTED_ROLES else special_or_tags, change)
            for message in messages
        ], [_changed(value, special, change) for value in others]

    needed = False  # whether any text could make a control token

    def look(text: str, controls: ControlTexts, edges: bool) -> str:
        nonlocal needed
        needed = needed or bool(controls.places(text, edges))
        return text

    unchanged = changed(look)
    if not needed:
        return *unchanged, ""
    texts = [*_texts(messages), *_texts(others)]
    mark = next((mark for mark in MARKS if not any(mark in text for text in texts)), None)
    if mark is None:
        raise ValueError("the messages contain all of U+FDD0 to U+FDEF, which are no characters")
    return *changed(lambda text, controls, edges: _with_marks(text, controls.places(text, edges), mark)), mark


def unmarked(text: str, mark: str) -> ChatText:
    """Return a rendered text without its marks."""
    if not mark:
        return ChatText(text)
    pieces = text.split(mark)
    places, length = [], 0
    for piece in pieces[:-1]:
        length += len(piece)
        if length:
            places.append(length - 1)
    return ChatText("".join(pieces), tuple(places))


def _by_first(texts: Iterable[str]) -> dict[str, set[str]]:
    """Return the rest of each text, by its first character."""
    rests: dict[str, set[str]] = {}
    for text in texts:
        rests.setdefault(text[0], set()).add(text[1:])
    return rests


def _any_of(texts: Collection[str]) -> str:
    """Return a regular expression for the start of any of these texts, with common prefixes merged. Otherwise a text
    full of token starts would be compared with each token at every position."""
    if "" in texts or not texts:
        return ""
    branches = [re.escape(first) + _any_of(rests) for first, rests in _by_first(texts).items()]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _with_marks(text: str, places: Sequence[int], mark: str) -> str:
    """Return a text with a mark after each of these characters."""
    pieces, start = [], 0
    for index in places:
        pieces.append(text[start : index + 1])
        start = index + 1
    return mark.join([*pieces, text[start:]])


def _message(message: Mapping[str, Any], controls: ControlTexts, change: Change) -> dict[str, Any]:
    """Return a message with its texts changed; roles of the template stay."""
    return {
        name: value
        if name == "role" and value in ROLES
        else change(value, controls, True)
        if isinstance(value, str)
        else [_part(part, controls, change) for part in value]
        if name == "content" and isinstance(value, list)
        else _changed(value, controls, change)
        for name, value in message.items()
    }


def _part(part: Mapping[str, Any], controls: ControlTexts, change: Change) -> dict[str, Any]:
    """Return a part of a message with images. Templates join texts of parts, so that two could be one control token."""
    return {name: change(value, controls, True) if name == "text" else value for name, value in part.items()}


def _changed(value: Any, controls: ControlTexts, change: Change) -> Any:
    """Return a JSON value with each of its texts changed, including keys. Templates compare some of them (a parameter's
    type), so only texts that contain a control token are changed."""
    if isinstance(value, str):
        return change(value, controls, False)
    if isinstance(value, Mapping):
        return {_changed(k, controls, change): _changed(part, controls, change) for k, part in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(part, controls, change) for part in value]
    return value


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _texts(name)
            yield from _texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)


_ANCHORS = ("\n", "a", "1")  # text before a text: some tokenizers add a space at the start of a prompt


class ControlTokens:
    """The tokenizer's control tokens. texts: texts of special tokens; of special tokens and tags."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
        controls = {token: content for token, content in added.items() if content.special or is_tag(content.content)}
        special = [content.content for content in controls.values() if content.special]
        self.texts = ControlTexts(special), ControlTexts(content.content for content in controls.values())
        self._plain = _plain_ids(tokenizer, {token: content.content for token, content in controls.items()})
        self._text_of = {token: content.content for token, content in controls.items()}

    def encode(self, chat: ChatText, add_special_tokens: bool) -> list[int]:
        """Return token ids. A control token with a mark in its span is encoded as plain text."""
        encoding = self._tokenizer.encode_batch([chat.text], add_special_tokens=add_special_tokens)[0]
        ids: list[int] = []
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._plain and chat.is_marked(start, end):
                ids += self._span_ids(token, chat.text[start:end])
            else:
                ids.append(token)
        return ids

    def _span_ids(self, token: int, span: str) -> list[int]:
        """Return the plain ids of a token's text, and of the spaces that the token includes."""
        before, separator, after = span.partition(self._text_of[token])
        if not separator:  # it was normalized
            return self._plain[token]
        return [*self._spaces(before), *self._plain[token], *self._spaces(after)]

    def _spaces(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids) if text else []


def _plain_ids(tokenizer: Tokenizer, texts: dict[int, str]) -> dict[int, list[int]]:
    """Return, by token, its text encoded as plain text, without tokens of `texts`; [] if that is impossible."""
    by_token = {}
    tokenizer.encode_special_tokens = True
    try:
        for token, text in texts.items():
            by_token[token] = (
                _after_anchor(tokenizer, [text], texts) or _after_anchor(tokenizer, list(text), texts) or []
            )
    finally:
        tokenizer.encode_special_tokens = False
    return by_token


def _after_anchor(tokenizer: Tokenizer, parts: list[str], controls: dict[int, str]) -> list[int]:
    """Return the ids of the parts; [] if one is in `controls`."""
    ids: list[int] = []
    for part in parts:
        own: list[int] = tokenizer.encode(part, add_special_tokens=False).ids
        for anchor in _ANCHORS:
            alone = tokenizer.encode(anchor, add_special_tokens=False).ids
            whole = tokenizer.encode(anchor + part, add_special_tokens=False).ids
            if whole[: len(alone)] == alone:
                own = whole[len(alone) :]
                break
        ids += own
    return [] if controls.keys() & set(ids) else ids


PIECE_CHARS = 2**16
_SEARCH_CHARS = 256  # characters before a piece's end that are searched for a space, with which most tokens start
SLACK_TOKENS = 1024  # additional tokens encoded before the kept part, so that the cut does not change the kept ones

Count = Callable[[str], int]


class TooManyTokensError(ValueError):
    """num_tokens: a lower bound on the text's tokens."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"more than {num_tokens} tokens")
        self.num_tokens = num_tokens


def exceeds(count: Count, text: str, num_tokens: int) -> bool:
    """Whether `text` certainly has more tokens, in spite of cuts."""
    total = 0
    for number, (start, end) in enumerate(_pieces(text)):
        total += count(text[start:end])
        if total - 8 * number > num_tokens:
            return True
    return False


@dataclass(frozen=True)
class Truncation:
    """The tokens of a prompt that is truncated.

    num_tokens: maximum number.
    at_end: keep the last ones, else the first.
    """

    num_tokens: int
    at_end: bool = True

    def of(self, tokens: list[int]) -> list[int]:
        """Return the kept part of `tokens`."""
        return tokens[-self.num_tokens :] if self.at_end else tokens[: self.num_tokens]

    def part(self, count: Count, text: str) -> tuple[int, int]:
        """Return start and end of a part of `text` that contains these tokens, and some more."""
        pieces = list(_pieces(text))
        total = 0
        for start, end in reversed(pieces) if self.at_end else pieces:
            total += count(text[start:end])
            if total > self.num_tokens + SLACK_TOKENS:
                return (start, len(text)) if self.at_end else (0, end)
        return 0, len(text)


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of pieces of `text` of at most PIECE_CHARS, cut before a space if there is one."""
    start = 0
    while start < len(text):
        end = min(len(text), start + PIECE_CHARS)
        if end < len(text):
            space = text.rfind(" ", end - _SEARCH_CHARS, end)
            end = space if space > start else end
        yield start, end
        start = end
