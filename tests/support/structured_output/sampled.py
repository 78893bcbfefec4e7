"""Schemas of many kinds, made from a seed, and whether an answer is what its schema describes."""

import json
import random
from typing import Any

import jsonschema
from tokenizers import Tokenizer

from aerie.workers.scheduling.plan import Grammar
from aerie.workers.structured_output.json_schema import checked_schema
from tests.support import MODELS
from tests.support.embedded import eos_token_ids

_WORDS = ("name", "age", "city", "tags", "price", "when", "kind", "notes", "items", "ok")


def schemas(count: int, seed: int = 0) -> list[Any]:
    """Objects of one to four properties, of every kind of value that is enforced."""
    rng = random.Random(seed)
    return [_object(rng, 2) for _ in range(count)]


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randint(1, 4))
    required = [name for name in names if rng.random() < 0.7] or names[:1]
    properties = {name: _value(rng, depth) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "enum", "boolean", "pattern", "format", "union", "const"]
    match rng.choice(kinds + ["object", "array", "array"] * (depth > 0)):
        case "string":
            return {"type": "string", "maxLength": rng.randint(3, 12)}
        case "integer":
            return {"type": "integer", "minimum": rng.randint(-5, 5), "maximum": rng.randint(6, 300)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": rng.randint(1, 50)}
        case "enum":
            return {"enum": rng.sample(["red", "green", 3, None, True, 'a "b" c'], rng.randint(1, 4))}
        case "boolean":
            return {"type": "boolean"}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-z]{2,4}$", "^(yes|no)$", "^[A-Z][0-9]{3}$"])}
        case "format":
            return {"type": "string", "format": rng.choice(["date", "time", "ipv4", "uuid"])}
        case "union":
            return {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 9}]}
        case "const":
            return {"const": rng.choice(["fixed", 12, False])}
        case "array":
            return {"type": "array", "items": _value(rng, depth - 1), "minItems": 1, "maxItems": rng.randint(1, 3)}
    return _object(rng, depth - 1)


def grammar_of(schema: Any, any_whitespace: bool = False) -> Grammar:
    """Return a grammar of the embedded pair's answers."""
    return Grammar("json_schema", checked_schema(schema, 32), eos_token_ids(), any_whitespace)


def text_of(tokens: list[int]) -> str:
    """Return the text of the embedded pair's tokens."""
    return str(Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json")).decode(tokens, skip_special_tokens=True))


def assert_follows(schema: Any, tokens: list[int], max_tokens: int) -> bool:
    """That an answer is valid, or was cut at its limit; whether it is whole."""
    text = text_of(tokens)
    if tokens[-1] not in eos_token_ids():
        assert len(tokens) == max_tokens, f"ended before its end: {text!r}"
        return False
    # formats are enforced by their pattern: a date may be a 30th of February, a part of an address 007
    jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker(("uuid",)))
    return True
