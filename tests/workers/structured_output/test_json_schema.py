"""Which schemas are enforced whole: what is rewritten, and what is refused by which keyword."""

import json
import random
import re
from decimal import Decimal
from typing import Any

import hypothesis
import jsonschema
import pytest
import xgrammar
from hypothesis import strategies as st

from aerie.workers.scheduling.plan import Grammar
from aerie.workers.structured_output import schema_patterns
from aerie.workers.structured_output.compiler import GrammarCompiler, Vocabulary
from aerie.workers.structured_output.json_schema import checked_schema
from aerie.workers.structured_output.mask_messages import InvalidGrammarError
from aerie.workers.structured_output.mask_process.trial import try_grammar
from aerie.workers.structured_output.schema_keywords import UnsupportedSchemaError
from tests.support import MODELS, ROOT
from tests.support.embedded import eos_token_ids

PAGE = (ROOT / "docs/structured-output.md").read_text()
REFUSED_WORDS = PAGE.partition("## Schemas are enforced whole or refused")[2].partition("\n## ")[0]
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
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "$ref", "#/$defs/a"),
    (
        {"properties": {"a": {"$id": "x", "properties": {"b": {"$ref": "#/$defs/c"}}}}},
        "$ref",
        "#/properties/a/properties/b",
    ),
    ({"$ref": "#/$defs"}, "$ref", "#"),
    ({"items": {"$ref": "#/items/1"}}, "$ref", "#/items"),
    ({"items": {"$ref": 1}}, "$ref", "#/items"),
    ({"$defs": {"a": {"not": {}}}, "$ref": "#/$defs/a"}, "not", "#/$defs/a"),
    ({"type": "string", "pattern": "a", "maxLength": 3}, "maxLength", "#"),
    ({"type": "string", "format": "date", "minLength": 11}, "minLength", "#"),
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
    ({"type": "string", "pattern": r"^\ud83d\ude00$"}, "pattern", "#"),
    ({"patternProperties": {r"\\\uDC00": {}}}, "patternProperties", "#"),
    ({"propertyNames": {"pattern": r"\u{d83d}"}}, "pattern", "#/propertyNames"),
    ({"type": "number", "minimum": 0.1234567}, "minimum", "#"),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1e-9}, "maximum", "#"),
    ({"type": "number", "exclusiveMaximum": 1e300}, "exclusiveMaximum", "#"),
    ({"type": "number", "maximum": 548084039161.83}, "maximum", "#"),
    ({"type": "number", "minimum": 2**53 + 1}, "minimum", "#"),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-6}, "", "#"),
    ({"minimum": 5, "maximum": 4}, "", "#"),
    ({"const": 10**30}, "const", "#"),
    ({"enum": [{"a": [-(2**63) - 1]}]}, "enum", "#"),
    ({"type": "object", "minProperties": 2}, "minProperties", "#"),
    ({"properties": {"a": {}}, "additionalProperties": {}, "minProperties": 2}, "minProperties", "#"),
    ({"strict": "yes"}, "strict", "#"),
    (5, "", "#"),
]


@pytest.mark.parametrize(("schema", "keyword", "path"), UNSUPPORTED, ids=lambda value: str(value)[:50])
def test_what_is_not_enforced_is_refused_by_keyword_and_place(schema: Any, keyword: str, path: str) -> None:
    with pytest.raises(UnsupportedSchemaError) as found:
        checked_schema(schema, 32)
    assert (found.value.keyword, found.value.path) == (keyword, path)
    assert keyword in str(found.value) and path in str(found.value)
    assert keyword in ("", "surprise") or f"`{keyword}`" in REFUSED_WORDS, "the page lists it"


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
    ({"type": "string", "format": "date", "pattern": "^2[a-z]*$"}, {"type": "string", "pattern": "^2[a-z]*$"}),
    ({"type": "string", "format": "cuid2", "pattern": "^[a-z]+$"}, {"type": "string", "pattern": "^[a-z]+$"}),
    (
        {"items": [{"type": "null"}], "additionalItems": {"minimum": 3}},
        {"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "number", "minimum": 3}},
    ),
    ({"items": [{}], "additionalItems": False}, {"type": "array", "prefixItems": [{}], "items": False}),
    ({"strict": True, "type": "null"}, {"type": "null"}),
    ({"pattern": r"\*\u00e9"}, {"type": "string", "pattern": r"\*\u00e9"}),
    (
        {"properties": {"a": {}}, "patternProperties": {"^x-": {}, "^y-.*$": {"type": "null"}}},
        {
            "type": "object",
            "properties": {"a": {}},
            "patternProperties": {"^x-": {}, r'^y-[^\u0000-\u001f"\\]*$': {"type": "null"}},
        },
    ),
    ({"type": "array", "items": {}, "uniqueItems": False}, {"type": "array", "items": {}}),
    ({"pattern": r"^a$|^b\$|c|[|$]|(d|e)$"}, {"type": "string", "pattern": r"^(?:a|b\$|c|[\u007c\u0024]|(d|e))$"}),
    (
        {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "null"}, "required": ["b"]},
        {
            "type": "object",
            "additionalProperties": False,
            "required": ["b"],
            "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
        },
    ),
]

NULL = {"type": "null"}
REFERENCES: list[tuple[Any, Any]] = [
    ({"properties": {"a": NULL, "b": {"$ref": "#/properties/a"}}}, "a"),
    ({"definitions": {"x y/z": NULL}, "properties": {"b": {"$ref": "#/definitions/x%20y~1z"}}}, "z"),
    ({"$defs": {"": NULL}, "properties": {"b": {"$ref": "#/$defs/"}}}, "_"),
    ({"$defs": {"a": {"$anchor": "n", **NULL}}, "properties": {"b": {"$ref": "#n"}}}, "a"),
    ({"$defs": {"a": {"$id": "Node", **NULL}}, "properties": {"b": {"$ref": "Node"}}}, "a"),
    ({"$defs": {"a": {"anyOf": [NULL]}}, "properties": {"b": {"$ref": "#/$defs/a/anyOf/0"}}}, "0"),
    ({"$defs": {"a": {"$ref": "#/$defs/c"}, "c": NULL}, "properties": {"b": {"$ref": "#/$defs/a"}}}, "c"),
    ({"$defs": {"a": NULL, "z": {"not": {}}}, "properties": {"b": {"$ref": "#/$defs/a"}}}, "a"),
]


@pytest.mark.parametrize(("schema", "name"), REFERENCES, ids=lambda value: str(value)[:60])
def test_references_to_any_part_become_definitions(schema: Any, name: str) -> None:
    written = json.loads(checked_schema(schema, 32))
    assert written["$defs"] == {name: NULL}
    assert written["properties"]["b"] == {"$ref": f"#/$defs/{name}"}


def test_definitions_of_one_name_are_told_apart() -> None:
    parts = {"a": {"type": "object", "properties": {"x": NULL}}, "b": {"type": "object", "properties": {"x": {}}}}
    both = {name: {"$ref": f"#/properties/{name}/properties/x"} for name in ("a", "b")}
    written = json.loads(checked_schema({"properties": parts | {f"{name}_": ref for name, ref in both.items()}}, 32))
    assert sorted(written["$defs"]) == ["x", "x_"]
    places = [written["properties"][name]["$ref"].rpartition("/")[2] for name in ("a_", "b_")]
    assert [written["$defs"][place] for place in places] == [NULL, {}]


def of_kind(kind: Any, required: bool = True, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"kind": kind, **properties}, "additionalProperties": False}
    return schema | {"required": ["kind"] if required else []}


A, B, AB = of_kind({"const": "a"}), of_kind({"enum": ["b", 1]}), of_kind({"enum": ["a", "b"]})
DISJOINT: list[tuple[list[Any], bool]] = [
    ([A, B], True),
    ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], True),
    ([{"$ref": "#/$defs/a"}, NULL, {"type": "string"}], True),
    ([{"anyOf": [A, AB]}, of_kind({"const": "c"})], True),
    ([of_kind({"const": "a"}, False), of_kind({"const": "b"}, False)], True),
    ([of_kind({"$ref": "#/$defs/values"}), of_kind({"const": "c"})], True),
    ([{"enum": ["a", 1]}, {"enum": ["b", 2]}], True),
    ([{"enum": [1]}, {"const": True}], True),
    ([A, AB], False),
    ([A, of_kind({"type": "string"})], False),
    ([of_kind({"const": 1}), of_kind({"const": 1.0})], False),
    ([{"type": "integer"}, {"type": "number"}], False),
    ([{"enum": [1, "a"]}, {"type": "string"}], False),
    ([A, True], False),
    ([of_kind({"const": "a"}), {"properties": {"kind": {"const": "b"}}, "required": ["kind"]}], True),
    ([{"type": "string"}, {"properties": {"kind": {"const": "b"}}, "required": ["kind"]}], False),
    ([{"type": ["object", "null"], **of_kind({"const": "a"})}, B, NULL], True),
    ([{"type": "array"}, {"type": "array", "items": NULL}], False),
]


@pytest.mark.parametrize(("branches", "is_taken"), DISJOINT, ids=lambda value: str(value)[:60])
def test_one_of_is_taken_where_its_cases_exclude_each_other(branches: list[Any], is_taken: bool) -> None:
    definitions = {"a": A, "b": {"$ref": "#/$defs/c"}, "c": B, "values": {"enum": ["a", "b"]}}
    schema = {"$defs": definitions, "oneOf": branches}
    written = json.loads(checked_schema(schema, 32))
    assert ("anyOf" in written) == is_taken
    if not is_taken:
        return
    compiled = COMPILER.compile(Grammar("json_schema", json.dumps(written), eos_token_ids(), any_whitespace=False))
    for text in ("{}", '{"kind": "a"}', '{"kind": "b"}', '{"kind": 1}', "null", '"a"', "1", "true", '{"kind": null}'):
        if _allows(compiled, text):
            jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("any_whitespace", [True, False])
@pytest.mark.parametrize("kind", ["json_schema", "structural_tag"])
def test_strings_with_lengths_have_no_control_characters(kind: Any, any_whitespace: bool) -> None:
    schema = checked_schema({"properties": {"a": {"type": "string", "minLength": 1, "maxLength": 3}}}, 32)
    tag = json.dumps({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": json.loads(schema)}})
    text = schema if kind == "json_schema" else tag
    compiled = COMPILER.compile(Grammar(kind, text, eos_token_ids(), any_whitespace))
    texts = {"a": True, "é😀/": True, "abcd": False, "": False, "\t": False, "\x1f": False}
    assert {text: _allows(compiled, f'{{"a": "{text}"}}') for text in texts} == texts
    assert _allows(compiled, '{  "a": "b" }') == any_whitespace


LONG_EMAIL = schema_patterns._EMAIL
LENGTHS: list[tuple[dict[str, Any], Any]] = [
    ({"format": "uri", "minLength": 1}, {"type": "string", "format": "uri"}),
    ({"format": "uuid", "minLength": 36, "maxLength": 36}, {"type": "string", "format": "uuid"}),
    ({"format": "date", "maxLength": 9}, "maxLength"),
    ({"format": "email", "maxLength": 100}, "maxLength"),
    ({"format": "json-pointer", "minLength": 1}, "minLength"),
    ({"format": "uri", "minLength": 9}, "minLength"),
    ({"pattern": LONG_EMAIL, "format": "email", "minLength": 5, "maxLength": 254}, None),
    ({"format": "uri", "minLength": 1, "maxLength": 2083}, None),
]


@pytest.mark.parametrize(("schema", "written"), LENGTHS, ids=lambda value: str(value)[:50])
def test_lengths_that_a_format_implies_are_left_out(schema: dict[str, Any], written: Any) -> None:
    if isinstance(written, str):
        with pytest.raises(UnsupportedSchemaError) as found:
            checked_schema(schema, 32)
        assert found.value.keyword == written
        return
    found = json.loads(checked_schema(schema, 32))
    if written is not None:
        assert found == written
        return
    label, low, high = "a" * 30, schema["minLength"], schema["maxLength"]
    longest = [f"{'a' * 64}@{f'{label}.' * 4}{'b' * 29}", f"https://{'.'.join([label] * 4)}:1234/{'?' * 160}"]
    for text in longest:
        assert not re.search(found["pattern"], text + "é") and len(text) <= schema_patterns._LENGTHS["uri"][1]
        if re.search(found["pattern"], text):
            assert low <= len(text) <= high and len(text) in {most for _, most, _ in schema_patterns._LENGTHS.values()}
            break
    else:
        raise AssertionError("the longest text is not possible")


@pytest.mark.parametrize("pattern", schema_patterns._STAND_INS)
def test_texts_of_a_stand_in_match_the_published_pattern(pattern: str) -> None:
    """Random texts, most of which the published pattern refuses."""
    other, draw, num_matches = schema_patterns.compiled_form(pattern), random.Random(0), 0
    parts = ["a", ".", "-", "P", "T", "1D", "2M", "3H", "4W", "5S", "Y", "@", "ab.cd", "0", "+"]
    for _ in range(20_000):
        text = "".join(draw.choices(parts, k=draw.randrange(9)))
        if re.search(other, text):
            num_matches += 1
            assert re.search(pattern, text), text
    assert num_matches > 20


@pytest.mark.parametrize(("schema", "written"), REWRITTEN, ids=lambda value: str(value)[:50])
def test_what_the_compiler_would_drop_is_written_otherwise(schema: Any, written: Any) -> None:
    assert json.loads(checked_schema(schema, 32)) == written


COMPILER = GrammarCompiler(Vocabulary(MODELS / "target"))  # as the engine has it, with caches


def _allows(compiled: xgrammar.CompiledGrammar, text: str) -> bool:
    """Whether `text` is a whole answer."""
    matcher = xgrammar.GrammarMatcher(compiled)
    return (not text or matcher.accept_string(text)) and matcher.accept_token(eos_token_ids()[0])


@pytest.mark.parametrize("count", [100, 128, 200, 300])
@pytest.mark.parametrize("schema", [{}, {"type": "object", "required": ["a"]}, {"type": "array", "maxItems": 500}])
def test_long_patterns_are_compiled_by_engines_too(schema: Any, count: int) -> None:
    """The trial has no caches, with which xgrammar 0.2.8 fails on them: engines refused what the trial had passed."""
    pattern = {"type": "string", "pattern": f"^[a-z]{{1,{count}}}$"}
    whole = {"object": {"properties": {"a": pattern}}, "array": {"items": pattern}}.get(schema.get("type"), pattern)
    grammar = Grammar("json_schema", checked_schema(schema | whole, 32), eos_token_ids(), any_whitespace=False)
    letters = "a" * count
    text = {"object": f'{{"a": "{letters}"}}', "array": f'["{letters}"]'}.get(schema.get("type"), f'"{letters}"')
    for _ in range(2):
        compiled = COMPILER.compile(grammar)
        assert _allows(compiled, text) and not _allows(compiled, text.replace('a"', 'aa"', 1))


_UNITS = st.integers(-(2**33) * 10, 2**33 * 10) | st.integers(-30, 30)


@hypothesis.given(
    low=st.none() | _UNITS,
    width=st.none() | st.integers(0, 30) | st.integers(0, 2**40),
    decimals=st.integers(0, 9),
    names=st.tuples(st.sampled_from(["minimum", "exclusiveMinimum"]), st.sampled_from(["maximum", "exclusiveMaximum"])),
    kind=st.sampled_from(["number", "number", "integer"]),
)
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
def test_numbers_that_are_possible_are_within_their_bounds(
    low: int | None, width: int | None, decimals: int, names: tuple[str, str], kind: str
) -> None:
    unit = Decimal(1) if kind == "integer" else Decimal(10) ** -decimals
    ends = [unit * end for end in (low or 0, (low or 0) + (width or 0))]
    given_ends = [(names[0], ends[0])] * (low is not None) + [(names[1], ends[1])] * (width is not None)
    schema = {"type": kind, **{name: float(end) if end % 1 else int(end) for name, end in given_ends}}
    try:
        compiled = COMPILER.compile(Grammar("json_schema", checked_schema(schema, 32), eos_token_ids(), False))
    except (UnsupportedSchemaError, InvalidGrammarError):
        return
    texts = {"", "-", "-0", "0.0", "1e3", "-1e3"}
    for end in ends:
        near = [end + sign * Decimal(10) ** -k for k in range(0, 10, 3) for sign in (-1, 0, 1)]
        texts |= {format(value, form) for value in near for form in ("f", ".6f", ".0f")}
    for text in filter(lambda text: _allows(compiled, text), texts):
        jsonschema.validate(json.loads(text, parse_float=Decimal), json.loads(json.dumps(schema), parse_float=Decimal))


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
