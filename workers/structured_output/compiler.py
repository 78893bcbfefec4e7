"""Compiles grammars for a model's vocabulary with xgrammar, which imports torch. Only processes forked by
`aerie.workers.structured_output.mask_process.template_process` import this module.

A compiled grammar has states, and the allowed tokens of each. Special tokens are never allowed, except the grammar's
end tokens and special tokens in structural tags.
"""

import contextlib
import functools
import json
from pathlib import Path
from typing import Any

import xgrammar
from tokenizers import Tokenizer

from aerie.workers.scheduling.plan import Grammar
from aerie.workers.structured_output.mask_messages import InvalidGrammarError, VocabularyError
from aerie.workers.structured_output.mask_process.token_texts import TokenTexts
from aerie.workers.structured_output.token_bytes import TokenBytes, read_tokenizer

CACHE_BYTES = 256 << 20  # cache of compiled grammars; a large schema takes 10 MB with 128,256 tokens
# Maximum spaces between the parts of JSON. Without a bound some models write spaces until max_tokens.
MAX_WHITESPACE = 32
MAX_FAULT_CHARS = 400  # maximum length of an error, which quotes the grammar


class Vocabulary:
    """The tokens of the model in `folder`. Raises VocabularyError.

    vocab_size: size of the model's logits, at least the tokenizer's vocabulary; 0: that of the tokenizer.
    """

    def __init__(self, folder: str | Path, vocab_size: int = 0) -> None:
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise VocabularyError(f"{path}: missing; answers can follow a grammar only where there is a tokenizer")
        try:
            self.tokenizer = read_tokenizer(path.parent)
        except ValueError as error:
            raise VocabularyError(str(error)) from None
        ids = self.tokenizer.get_vocab(with_added_tokens=True)
        self.size = vocab_size or max(ids.values()) + 1
        self._known: dict[tuple[tuple[int, ...], bool], xgrammar.TokenizerInfo] = {}

    def tokens(self, end_token_ids: tuple[int, ...], with_special: bool) -> xgrammar.TokenizerInfo:
        """Return xgrammar's tokens for grammars with these end tokens. with_special: whether texts may have special
        tokens."""
        key = end_token_ids, with_special
        if key not in self._known:
            words = _words(self.tokenizer, self.size, with_special)
            self._known[key] = xgrammar.TokenizerInfo(words, vocab_size=self.size, stop_token_ids=list(end_token_ids))
        return self._known[key]


class GrammarCompiler:
    """Compiles grammars for a vocabulary.

    num_threads: threads that compile one grammar.
    caches: whether to cache compiled grammars; the library then warns only once about each.
    """

    def __init__(self, vocabulary: Vocabulary, num_threads: int = 1, caches: bool = True) -> None:
        self._vocabulary = vocabulary
        self._num_threads = num_threads
        self._remembers = caches

    def compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """Compile a grammar. Raises InvalidGrammarError or VocabularyError."""
        faults = RuntimeError, ValueError, TypeError, LookupError
        try:
            if self._remembers and not _may_have_token_ids(grammar):
                # with caches, xgrammar 0.2.8 fails here on a pattern such as [a-z]{1,200} in a JSON schema
                with contextlib.suppress(*faults):
                    return compiled(self._compiler(grammar, True), grammar)
            return compiled(self._compiler(grammar, False), grammar)
        except faults as error:
            raise InvalidGrammarError(_first_line(error)) from None

    def texts_of(self, compiled: xgrammar.CompiledGrammar) -> TokenTexts:
        """Return the bytes of the tokens."""
        return TokenTexts(compiled.tokenizer_info.decoded_vocab, self._vocabulary.tokenizer)

    def _compiler(self, grammar: Grammar, caches: bool) -> xgrammar.GrammarCompiler:
        return self._compiler_of(grammar.end_token_ids, grammar.kind == "structural_tag", caches)

    @functools.lru_cache(maxsize=8)  # noqa: B019 - lives as long as the process; few models have several ends
    def _compiler_of(
        self, end_token_ids: tuple[int, ...], with_special: bool, caches: bool
    ) -> xgrammar.GrammarCompiler:
        """Return xgrammar's compiler for a vocabulary with these end tokens."""
        return xgrammar.GrammarCompiler(
            self._vocabulary.tokens(end_token_ids, with_special),
            max_threads=self._num_threads,
            cache_enabled=caches,
            cache_limit_bytes=CACHE_BYTES,
        )


def _may_have_token_ids(grammar: Grammar) -> bool:
    """Return whether a grammar may name tokens by id, such as `Token(5)` or {"type": "token", "token": 5}.

    xgrammar 0.2.8 caches the masks of a rule by a hash that ignores ids: after a request that allows only token 5, the
    cache allows the same token for one with token 6.
    """
    return grammar.kind in ("ebnf", "structural_tag") and "token" in grammar.text.lower()


def compiled(compiler: xgrammar.GrammarCompiler, grammar: Grammar) -> xgrammar.CompiledGrammar:
    """Compile a grammar. Raises RuntimeError, ValueError or TypeError if that fails."""
    match grammar.kind:
        case "json_schema":
            whitespace = MAX_WHITESPACE if grammar.any_whitespace else None
            if _has_lengths(grammar.text):
                return compiler.compile_grammar(_json_grammar(grammar.text, whitespace))
            if whitespace is None:
                return compiler.compile_json_schema(grammar.text, any_whitespace=False)
            return compiler.compile_json_schema(grammar.text, max_whitespace_cnt=whitespace)
        case "regex":
            return compiler.compile_regex(grammar.text)
        case "ebnf":
            return compiler.compile_grammar(grammar.text)
        case "choice":
            entries = [{"type": "const_string", "value": entry} for entry in json.loads(grammar.text)]
            tag = {"type": "structural_tag", "format": {"type": "or", "elements": entries}}
            return compiler.compile_structural_tag(tag)
    tag = json.loads(grammar.text)
    if "format" in tag:
        return compiler.compile_structural_tag(_with_bounded_whitespace(tag, grammar.any_whitespace))
    items = [xgrammar.StructuralTagItem.model_validate(item) for item in tag["structures"]]
    return compiler.compile_structural_tag(items, tag["triggers"])


def _with_bounded_whitespace(part: Any, any_whitespace: bool) -> Any:
    """Return a part of a structural tag with bounded whitespace in its JSON schemas, as outside of tags. A schema's own
    bound has priority.

    A schema is replaced with its grammar if it permits no whitespace, which a tag cannot express, or if it bounds the
    lengths of strings (see `_json_grammar`).

    part: the tag, or a list or object in it.
    any_whitespace: permit whitespace, up to MAX_WHITESPACE.
    """
    if isinstance(part, list):
        return [_with_bounded_whitespace(item, any_whitespace) for item in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") != "json_schema":
        return {name: _with_bounded_whitespace(item, any_whitespace) for name, item in part.items()}
    if part.get("style", "json") != "json":
        return part
    schema = json.dumps(part["json_schema"])
    whitespace = part.get("max_whitespace_cnt", MAX_WHITESPACE if any_whitespace else None)
    if whitespace is None or _has_lengths(schema):
        return {"type": "grammar", "grammar": _json_grammar(schema, whitespace)}
    return part | {"max_whitespace_cnt": whitespace}


def _has_lengths(schema: str) -> bool:
    """Return whether a JSON schema bounds the length of a string; True also for a property of that name."""
    return '"minLength"' in schema or '"maxLength"' in schema


def _json_grammar(schema: str, max_whitespace: int | None) -> str:
    """Return the grammar of a JSON schema. max_whitespace: spaces between parts; None: exactly one after commas and
    colons.

    xgrammar 0.2.8 lets a string with a length have control characters, such as a tab, which are not JSON.
    """
    if max_whitespace is None:
        form = xgrammar.Grammar.from_json_schema(schema, any_whitespace=False)
    else:
        form = xgrammar.Grammar.from_json_schema(schema, max_whitespace_cnt=max_whitespace)
    return str(form).replace(r"([^\"\\\r\n])", r"([^\0-\x1f\"\\\r\n])")


def _words(tokenizer: Tokenizer, vocab_size: int, with_special: bool) -> list[bytes]:
    """Return the bytes of every token; b"" for one without a text. The tokens need not spell all bytes: a grammar then
    allows the texts that they do spell.

    Structural tags may name ids of the model that its tokenizer does not know. xgrammar 0.2.8 allows no token without a
    text, so these have one that is not UTF-8 and fits no text.
    """
    ids = set(tokenizer.get_vocab(with_added_tokens=True).values())
    if not with_special:
        ids -= {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    bytes_of = TokenBytes(tokenizer).of
    unknown = b"\xff%d" if with_special else b""
    return [bytes_of(token) if token in ids else unknown % token if unknown else b"" for token in range(vocab_size)]


def _first_line(error: Exception) -> str:
    """Return xgrammar's message without time and source location. If it quotes one byte of a character, the binding
    raises UnicodeDecodeError, which contains the message."""
    text = error.object.decode(errors="replace") if isinstance(error, UnicodeDecodeError) else str(error)
    lines = [line for line in text.splitlines() if line.strip()] or [type(error).__name__]
    line = lines[0].partition(".cc:")[2].partition(": ")[2] or lines[0]
    return line if len(line) <= MAX_FAULT_CHARS else f"{line[:MAX_FAULT_CHARS]}..."
