"""Control tokens of a tokenizer, and the plain tokens of their texts. Used by `cluster.http.text.tokenizer`."""

from typing import Any

from tokenizers import Tokenizer

from cluster.http.text.user_text import ChatText, ControlTexts, is_tag

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
                ids += self._of_span(token, chat.text[start:end])
            else:
                ids.append(token)
        return ids

    def _of_span(self, token: int, span: str) -> list[int]:
        """Return the plain ids of a token's text, and of the spaces that the token includes."""
        before, found, after = span.partition(self._text_of[token])
        if not found:  # it was normalized
            return self._plain[token]
        return [*self._spaces(before), *self._plain[token], *self._spaces(after)]

    def _spaces(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids) if text else []


def _plain_ids(tokenizer: Tokenizer, texts: dict[int, str]) -> dict[int, list[int]]:
    """Return, by token, its text encoded as plain text, without tokens of `texts`; [] if that is impossible."""
    found = {}
    tokenizer.encode_special_tokens = True
    try:
        for token, text in texts.items():
            found[token] = _after_anchor(tokenizer, [text], texts) or _after_anchor(tokenizer, list(text), texts) or []
    finally:
        tokenizer.encode_special_tokens = False
    return found


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
