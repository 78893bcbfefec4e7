"""Grammars compiled for a model's vocabulary, by xgrammar. Imports it, and so torch: only processes that
`workers.structured_output.template_process` makes import this module.

A compiled grammar says for each of its states which tokens may come. Special tokens occur in no text: but for the
grammar's own end tokens they are never allowed, except in structural tags, whose tags may be such tokens.
"""

import functools
import json
from pathlib import Path
from typing import Any

import xgrammar
from tokenizers import Tokenizer, pre_tokenizers

from workers.scheduling.plan import Grammar
from workers.structured_output.faults import InvalidGrammarError, VocabularyError
from workers.structured_output.token_texts import TokenTexts

CACHE_BYTES = 256 << 20  # of compiled grammars; one of a large schema takes 10 MB with 128,256 tokens
# Between the parts of JSON; without a bound a model that likes spaces writes nothing else until its tokens are used up.
MAX_WHITESPACE = 32


class Vocabulary:
    """What the tokens of the model in `folder` spell. vocab_size: of its logits, at least the tokenizer's; 0: that.

    Raises VocabularyError.
    """

    def __init__(self, folder: str | Path, vocab_size: int = 0) -> None:
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise VocabularyError(f"{path}: missing; answers can follow a grammar only where there is a tokenizer")
        self.tokenizer = Tokenizer.from_file(str(path))
        ids = self.tokenizer.get_vocab(with_added_tokens=True)
        self.size = vocab_size or max(ids.values()) + 1
        self._known: dict[tuple[tuple[int, ...], bool], xgrammar.TokenizerInfo] = {}

    def tokens(self, end_token_ids: tuple[int, ...], with_special: bool) -> xgrammar.TokenizerInfo:
        """For grammars that end with these. with_special: special tokens may occur in their texts."""
        key = end_token_ids, with_special
        if key not in self._known:
            words, kind = _words(self.tokenizer, self.size, with_special)
            self._known[key] = xgrammar.TokenizerInfo(
                words, kind, vocab_size=self.size, stop_token_ids=list(end_token_ids)
            )
        return self._known[key]


class GrammarCompiler:
    """Compiles grammars for a vocabulary.

    num_threads: that compile one grammar.
    remembers: compiled grammars, but for the least recently used ones; of these the library warns only once.
    """

    def __init__(self, vocabulary: Vocabulary, num_threads: int = 1, remembers: bool = True) -> None:
        self._vocabulary = vocabulary
        self._num_threads = num_threads
        self._remembers = remembers

    def compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """Raises InvalidGrammarError or VocabularyError."""
        compiler = self._compiler(grammar.end_token_ids, grammar.kind == "structural_tag")
        try:
            return compiled(compiler, grammar)
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            raise InvalidGrammarError(_first_line(error)) from None

    def texts_of(self, compiled: xgrammar.CompiledGrammar) -> TokenTexts:
        """What the tokens spell that one of its grammars allows."""
        return TokenTexts(compiled.tokenizer_info.decoded_vocab, self._vocabulary.tokenizer)

    @functools.lru_cache(maxsize=8)  # noqa: B019 - lives as long as the process; few models have several ends
    def _compiler(self, end_token_ids: tuple[int, ...], with_special: bool) -> xgrammar.GrammarCompiler:
        return xgrammar.GrammarCompiler(
            self._vocabulary.tokens(end_token_ids, with_special),
            max_threads=self._num_threads,
            cache_enabled=self._remembers,
            cache_limit_bytes=CACHE_BYTES,
        )


def compiled(compiler: xgrammar.GrammarCompiler, grammar: Grammar) -> xgrammar.CompiledGrammar:
    """Raises RuntimeError, ValueError or TypeError for what cannot be compiled."""
    match grammar.kind:
        case "json_schema":
            if grammar.any_whitespace:
                return compiler.compile_json_schema(grammar.text, max_whitespace_cnt=MAX_WHITESPACE)
            return compiler.compile_json_schema(grammar.text, any_whitespace=False)
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
    """A structural tag, or a part of one, whose JSON has whitespace as JSON without a tag; where a part says its own
    bound, that one. A tag's JSON schema cannot forbid whitespace, but for the grammar that it amounts to."""
    if isinstance(part, list):
        return [_with_bounded_whitespace(each, any_whitespace) for each in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") != "json_schema":
        return {name: _with_bounded_whitespace(each, any_whitespace) for name, each in part.items()}
    if part.get("max_whitespace_cnt") is not None or part.get("style", "json") != "json":
        return part
    if any_whitespace:
        return part | {"max_whitespace_cnt": MAX_WHITESPACE}
    form = xgrammar.Grammar.from_json_schema(json.dumps(part["json_schema"]), any_whitespace=False)
    return {"type": "grammar", "grammar": str(form)}


def _words(tokenizer: Tokenizer, vocab_size: int, with_special: bool) -> tuple[list[str], xgrammar.VocabType]:
    """Every token as the vocabulary spells it, "" for what stands for no text, and how it spells bytes."""
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    if all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        kind = xgrammar.VocabType.BYTE_FALLBACK
    elif all(letter in vocabulary for letter in pre_tokenizers.ByteLevel.alphabet()):
        kind = xgrammar.VocabType.BYTE_LEVEL
    else:
        raise VocabularyError("the tokenizer has no token for each byte; answers of this model can follow no grammar")
    words = [""] * vocab_size
    for word, token in vocabulary.items():
        if token < vocab_size:
            words[token] = word
    if not with_special:
        for token, added in tokenizer.get_added_tokens_decoder().items():
            if added.special and token < vocab_size:
                words[token] = ""
    return words, kind


def _first_line(error: Exception) -> str:
    """xgrammar's message without the time and the place in its sources."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0].partition(".cc:")[2].partition(": ")[2] or lines[0]
