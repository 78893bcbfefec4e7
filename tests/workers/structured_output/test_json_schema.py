"""Which schemas are enforced whole: what is rewritten, and what is refused by which keyword."""

import json
from typing import Any

import pytest

from tests.support import MODELS
from tests.support.embedded import eos_token_ids
from workers.scheduling.plan import Grammar
from workers.structured_output.compiler import Vocabulary
from workers.structured_output.json_schema import checked_schema
from workers.structured_output.mask_process.trial import try_grammar
from workers.structured_output.schema_keywords import UnsupportedSchemaError

UNSUPPORTED: list[tuple[Any, str, str]] = [
    ({"not": {"type": "integer"}}, "not", "#"),
    ({"if": {}, "then": {}}, "if", "#"),
    ({"type": "array", "contains": {}}, "contains", "#"),
    ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems", "#/properties/a"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired", "#"),
    ({"type": "object", "required": ["a"]}, "required", "#"),
    ({"type": "object", "properties": {"b": {}}, "propertyNames": {"pattern": "a"}}, "propertyNames", "#"),
    ({"type": "object", "properties": {"b": False}}, "false", "#/properties/b"),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "allOf", "#"),
    ({"anyOf": [{"type": "integer"}], "minimum": 3}, "minimum", "#"),
    ({"type": "object", "anyOf": [{"$ref": "#"}]}, "type", "#/anyOf/0"),
    ({"$defs": {"a": {}}, "$ref": "#/$defs/a", "minimum": 3}, "minimum", "#"),
    ({"$ref": "#/$defs/a"}, "$ref", "#"),
    ({"$ref": "#"}, "$ref", "#"),
    ({"$ref": "https://example.com/schema"}, "$ref", "#"),
    ({"$defs": {"a": {"$anchor": "x"}}, "$ref": "#/$defs/a"}, "$anchor", "#/$defs/a"),
    ({"type": "string", "pattern": "a", "maxLength": 3}, "maxLength", "#"),
    ({"type": "string", "format": "date", "minLength": 3}, "minLength", "#"),
    ({"type": "string", "format": "regex"}, "format", "#"),
    ({"type": "number", "multipleOf": 0.5}, "multipleOf", "#"),
    ({"type": "integer", "multipleOf": 5, "minimum": 1}, "multipleOf", "#"),
    ({"type": "integer", "exclusiveMinimum": True}, "exclusiveMinimum", "#"),
    ({"type": "array", "items": [{}], "prefixItems": [{}]}, "prefixItems", "#"),
    ({"type": "array", "items": {}, "additionalItems": False}, "additionalItems", "#"),
    ({"type": "string", "enum": [1]}, "enum", "#"),
    ({"type": "string", "const": 1}, "const", "#"),
    ({"type": "text"}, "type", "#"),
    ({"type": "string", "minimum": 3}, "minimum", "#"),
    ({"type": "string", "nullable": True}, "nullable", "#"),
    ({"patternProperties": {"a*": {"type": "integer"}, "aaa*": {"maximum": 20}}}, "patternProperties", "#"),
    ({"properties": {"foo": {"maxItems": 3}}, "patternProperties": {"f.o": {"minItems": 2}}}, "patternProperties", "#"),
    ({"properties": {"x-a": {}}, "patternProperties": {"^x-": {"type": "null"}}}, "patternProperties", "#"),
    ({"patternProperties": {"^x-": {}, "^x-y": {"type": "null"}}}, "patternProperties", "#"),
    ({"surprise": 1}, "surprise", "#"),
    ({"strict": "yes"}, "strict", "#"),
    (5, "", "#"),
]


@pytest.mark.parametrize(("schema", "keyword", "path"), UNSUPPORTED, ids=lambda value: str(value)[:50])
def test_what_is_not_enforced_is_refused_by_keyword_and_place(schema: Any, keyword: str, path: str) -> None:
    with pytest.raises(UnsupportedSchemaError) as found:
        checked_schema(schema, 32)
    assert (found.value.keyword, found.value.path) == (keyword, path)
    assert keyword in str(found.value) and path in str(found.value)


REWRITTEN: list[tuple[Any, Any]] = [
    (True, {}),
    ({"title": "x", "x-order": 1, "$schema": "y", "description": "z"}, {}),
    ({"type": "string", "enum": ["a", 1]}, {"enum": ["a"]}),
    ({"type": "integer", "const": 3}, {"enum": [3]}),
    ({"type": "integer", "enum": [float("inf"), 2.0]}, {"enum": [2.0]}),  # 1e999 in JSON
    ({"minLength": 3}, {"type": "string", "minLength": 3}),
    (
        {"type": ["string", "null"], "maxLength": 3},
        {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
    ),
    ({"type": "array", "minItems": 1}, {"type": "array", "minItems": 1, "items": {}}),
    ({"type": "object", "minProperties": 1}, {"type": "object", "minProperties": 1, "additionalProperties": True}),
    ({"allOf": [{"type": "integer"}]}, {"type": "integer"}),
    (
        {"type": "integer", "anyOf": [{"minimum": 3}, {"maximum": 0}]},
        {"anyOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 0}]},
    ),
    ({"type": "integer", "format": "int32"}, {"type": "integer"}),
    ({"type": "string", "format": "date", "pattern": "^2.*$"}, {"type": "string", "pattern": "^2.*$"}),
    ({"type": "string", "format": "cuid2", "pattern": "^[a-z]+$"}, {"type": "string", "pattern": "^[a-z]+$"}),
    (
        {"items": [{"type": "null"}], "additionalItems": {"minimum": 3}},
        {"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "number", "minimum": 3}},
    ),
    ({"items": [{}], "additionalItems": False}, {"type": "array", "prefixItems": [{}], "items": False}),
    ({"strict": True, "type": "null"}, {"type": "null"}),
    (
        {"properties": {"a": {}}, "patternProperties": {"^x-": {}, "^y-.*$": {"type": "null"}}},
        {
            "type": "object",
            "properties": {"a": {}},
            "patternProperties": {"^x-": {}, "^y-.*$": {"type": "null"}},
        },
    ),
    ({"type": "array", "items": {}, "uniqueItems": False}, {"type": "array", "items": {}}),
]


@pytest.mark.parametrize(("schema", "written"), REWRITTEN, ids=lambda value: str(value)[:50])
def test_what_the_compiler_would_drop_is_written_otherwise(schema: Any, written: Any) -> None:
    assert json.loads(checked_schema(schema, 32)) == written


def test_depth_is_limited() -> None:
    schema: Any = {}
    for _ in range(5):
        schema = {"type": "array", "items": schema}
    assert checked_schema(schema, 6)
    with pytest.raises(UnsupportedSchemaError, match="nested more than 5 deep"):
        checked_schema(schema, 5)


def test_what_the_compiler_warns_of_is_refused_every_time() -> None:
    """It warns when it compiles: of a grammar that it caches it says nothing."""
    schema = {"type": "string", "oneOf": [{"minLength": 2}, {"maxLength": 4}]}
    grammar, vocabulary = (
        Grammar("json_schema", checked_schema(schema, 32), eos_token_ids()),
        Vocabulary(MODELS / "target"),
    )
    assert [try_grammar(grammar, vocabulary).fault.partition(" ")[0] for _ in range(2)] == ["oneOf", "oneOf"]
