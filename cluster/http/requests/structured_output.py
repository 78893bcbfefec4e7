"""Turns a body's parameters for structured output into a `Grammar`: OpenAI's `response_format`, and the parameters of
vLLM's clients (`structured_outputs`, `guided_*`) and SGLang's (`json_schema`, `regex`, `ebnf`).

A body may have one of them. Invalid ones are refused here; `aerie.cluster.http.requests.grammar_checker` checks later
whether the grammar compiles. Called by `aerie.cluster.http.requests.edge_request`, and by
`aerie.cluster.http.requests.tools` for calls.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aerie.cluster.http.config import EdgeConfig
from aerie.cluster.http.errors import ApiError, invalid, unsupported
from aerie.cluster.http.text.json_text import parsed
from aerie.workers.scheduling.plan import Grammar, GrammarKind
from aerie.workers.structured_output.json_schema import checked_schema
from aerie.workers.structured_output.schema_keywords import UnsupportedSchemaError, check_pattern, pattern_fault

ANY_OBJECT = {"type": "object"}
# keys of `structured_outputs`: constraints, and options of the format
_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_STYLE = ("disable_any_whitespace", "disable_additional_properties", "disable_fallback", "whitespace_pattern")
MAX_CHOICE_ENTRIES = 1024  # maximum texts of a choice


class GrammarMaker:
    """Makes grammars of one request. end_token_ids: tokens on which its answer may end."""

    def __init__(self, config: EdgeConfig, end_token_ids: frozenset[int]) -> None:
        self._config = config
        self._end = tuple(sorted(end_token_ids))

    def from_body(self, body: Any) -> tuple[str, Grammar] | None:
        """Return the grammar of a body of `aerie.cluster.http.schema.request` and the parameter that asks for it; None
        without one. Raises ApiError."""
        makers: dict[str, Callable[[str, Any], Grammar | None]] = {
            "response_format": self._response_format,
            "structured_outputs": self._structured_outputs,
            "guided_json": self.json_schema,
            "guided_regex": self.regex,
            "guided_choice": self.choice,
            "guided_grammar": self.ebnf,
            "json_schema": self.json_schema,
            "regex": self.regex,
            "ebnf": self.ebnf,
            "allowed_token_ids": self.tokens,
            "bad_words": self.without,
        }
        grammars: dict[str, Grammar] = {}
        for param, make in makers.items():
            value = getattr(body, param)
            grammar = make(param, value) if value is not None else None
            if grammar is not None:
                grammars[param] = grammar
        if len(grammars) > 1:
            first, second, *_ = grammars
            raise invalid(second, f"{second} cannot be combined with {first}; ask for one form of answer")
        return next(iter(grammars.items()), None)

    def json_schema(self, param: str, schema: Any, any_whitespace: bool = True) -> Grammar:
        """Return a grammar of JSON that fits `schema`: an object, true, or a string of JSON. Raises ApiError."""
        if isinstance(schema, str):
            schema = _parsed(param, schema)
        try:
            text = checked_schema(schema, self._config.max_schema_depth)
        except UnsupportedSchemaError as error:
            raise ApiError(400, f"{param}: JSON schema: {error}", param=param, code="unsupported_json_schema") from None
        return self._grammar(param, "json_schema", text, any_whitespace)

    def regex(self, param: str, pattern: Any) -> Grammar:
        """Return a grammar of text that a regular expression matches as a whole. Raises ApiError."""
        text = _text(param, pattern)
        if fault := pattern_fault(text):
            raise invalid(param, f"{param}: {fault}")
        return self._grammar(param, "regex", text)

    def ebnf(self, param: str, text: Any) -> Grammar:
        """Return a grammar from GBNF text, with the rule `root`. Raises ApiError."""
        return self._grammar(param, "ebnf", _text(param, text))

    def choice(self, param: str, entries: Any) -> Grammar:
        """Return a grammar of exactly one of the strings. Raises ApiError."""
        is_list = isinstance(entries, list) and 1 <= len(entries) <= MAX_CHOICE_ENTRIES
        if not is_list or not all(isinstance(entry, str) and entry for entry in entries):
            raise invalid(param, f"{param} must be a list of 1 to {MAX_CHOICE_ENTRIES} strings that are not empty")
        return self._grammar(param, "choice", json.dumps(entries, ensure_ascii=False))

    def structural_tag(self, param: str, tag: Any) -> Grammar:
        """Return a grammar of free text with parts that follow schemas, from xgrammar's structural tag: {"type":
        "structural_tag", "format": {...}}, or the older {"structures": [...], "triggers": [...]}. Raises ApiError."""
        if isinstance(tag, str):
            tag = _parsed(param, tag)
        if not isinstance(tag, dict) or not ("format" in tag or {"structures", "triggers"} <= tag.keys()):
            raise invalid(param, f"{param} must be an object with `format`, or with `structures` and `triggers`")
        try:
            checked = self._with_checked_schemas({"type": "structural_tag", **tag}, self._config.max_schema_depth)
        except UnsupportedSchemaError as error:
            raise ApiError(400, f"{param}: JSON schema: {error}", param=param, code="unsupported_json_schema") from None
        return self._grammar(param, "structural_tag", json.dumps(checked, ensure_ascii=False))

    def tokens(self, param: str, ids: Sequence[int]) -> Grammar:
        """Return a grammar of one or more tokens of `ids`."""
        elements = [{"type": "token", "token": token} for token in ids]
        return self.structural_tag(param, {"format": {"type": "plus", "content": {"type": "or", "elements": elements}}})

    def without(self, param: str, words: Sequence[str]) -> Grammar | None:
        """Return a grammar of text without any of `words`."""
        if not words:
            return None
        return self.structural_tag(param, {"format": {"type": "any_text", "excludes": list(words)}})

    def _with_checked_schemas(self, value: Any, depth: int) -> Any:
        """Return a structural tag with its schemas rewritten for the compiler."""
        if depth == 0:
            raise UnsupportedSchemaError("", "", f"it is nested more than {self._config.max_schema_depth} deep")
        if isinstance(value, list):
            return [self._with_checked_schemas(part, depth - 1) for part in value]
        if not isinstance(value, dict):
            return value
        if value.get("type") == "regex":
            check_pattern(value.get("pattern"), "pattern", "")
        return {
            key: json.loads(checked_schema(part, self._config.max_schema_depth))
            if key in ("schema", "json_schema") and isinstance(part, dict | bool)
            else self._with_checked_schemas(part, depth - 1)
            for key, part in value.items()
        }

    def _response_format(self, param: str, value: Any) -> Grammar | None:
        """Return the grammar of OpenAI's `response_format`, None for text. Raises ApiError."""
        kind = value.get("type")
        match kind:
            case "text":
                return None
            case "json_object":
                return self.json_schema(param, ANY_OBJECT)
            case "json_schema":
                declared = value.get("json_schema")
                if not isinstance(declared, dict) or "schema" not in declared:
                    raise invalid(f"{param}.json_schema", f"{param}.json_schema must be an object with `schema`")
                return self.json_schema(f"{param}.json_schema.schema", declared["schema"])
            case "structural_tag":
                return self.structural_tag(param, value)
        known = "text, json_object, json_schema, structural_tag"
        raise invalid(f"{param}.type", f"{param}.type={kind!r}: must be one of {known}")

    def _structured_outputs(self, param: str, value: Mapping[str, Any]) -> Grammar | None:
        """Return the grammar of vLLM's `structured_outputs`, None if it demands no form. Raises ApiError."""
        for name in value:
            if name not in (*_KINDS, *_STYLE):
                raise invalid(f"{param}.{name[:100]}", f"Unknown parameter: {param}.{name[:100]}", "unknown_parameter")
        if value.get("whitespace_pattern") is not None:
            raise unsupported(f"{param}.whitespace_pattern", "use disable_any_whitespace")
        names = [name for name in _KINDS if value.get(name) not in (None, False)]
        if len(names) > 1:
            raise invalid(param, f"{param}: {names[1]} cannot be combined with {names[0]}; ask for one form of answer")
        if not names:
            return None
        (name,) = names
        where, wanted = f"{param}.{name}", value[name]
        any_whitespace = not value.get("disable_any_whitespace")
        match name:
            case "json":
                return self.json_schema(where, wanted, any_whitespace)
            case "json_object":
                return self.json_schema(where, ANY_OBJECT, any_whitespace)
            case "regex":
                return self.regex(where, wanted)
            case "choice":
                return self.choice(where, wanted)
            case "grammar":
                return self.ebnf(where, wanted)
        return self.structural_tag(where, wanted)

    def _grammar(self, param: str, kind: GrammarKind, text: str, any_whitespace: bool = True) -> Grammar:
        """Return a checked grammar. param: the parameter with its text, for errors. Raises ApiError."""
        limit = self._config.max_grammar_bytes
        if len(text.encode()) > limit:
            raise invalid(param, f"{param} is larger than {limit} bytes (ingress.max_grammar_bytes); make it smaller")
        if not self._end:
            raise unsupported(
                param, "the answer could not end: leave out ignore_eos, or give the model an eos_token_id"
            )
        return Grammar(kind, text, self._end, any_whitespace)


def _parsed(param: str, text: str) -> Any:
    try:
        return parsed(text)
    except ValueError as error:
        raise invalid(param, f"{param} is not JSON: {error}") from None


def _text(param: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise invalid(param, f"{param} must be a string that is not empty")
    return value
