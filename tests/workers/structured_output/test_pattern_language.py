"""Patterns of JSON schemas and regular expressions: an answer is possible if, and only if, the pattern matches it."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import xgrammar

from aerie.workers.scheduling.plan import Grammar
from aerie.workers.structured_output.compiler import GrammarCompiler, Vocabulary
from aerie.workers.structured_output.json_schema import checked_schema
from aerie.workers.structured_output.schema_keywords import UnsupportedSchemaError, pattern_fault
from tests.support import MODELS
from tests.support.embedded import eos_token_ids

COMPILER = GrammarCompiler(Vocabulary(MODELS / "target"))
ATOMS = ("x", "y", "z", "é", "[xy]", "[^x]", "[)(]", "[ -~]", r"\d", r"\S", r"[\D]", r"\(", r"\"", r"\\", ".")
QUANTIFIERS = ("", "", "", "?", "*", "+", "{2}", "{0,1}", "{1,2}", "{2,}", "{0,}", "{0}", "??", "+?")
CHARACTERS = 'xyz1é()"\\'
PATHS = ("value", "key", "name", "regex", "tag", "xml")
SHORT, LONG = range(60), range(1000, 4000)


def pattern(draw: random.Random, depth: int) -> str:
    """Return a random pattern of groups nested up to `depth`."""
    return "|".join(sequence(draw, depth) for _ in range(draw.choice([1, 1, 2])))


def sequence(draw: random.Random, depth: int) -> str:
    parts = ""
    for _ in range(draw.choice([0, 1, 1, 2, 2])):
        opening = draw.choice(["(", "(?:"])
        atom = f"{opening}{pattern(draw, depth - 1)})" if depth and draw.random() < 0.5 else draw.choice(ATOMS)
        parts += atom + draw.choice(QUANTIFIERS)
    return parts


def texts(draw: random.Random, given: str) -> Iterator[str]:
    """Yield random texts, most of them of the characters that the pattern names."""
    named = [character for character in CHARACTERS if character in given] or list(CHARACTERS)
    for _ in range(25):
        yield "".join(draw.choices(named if draw.random() < 0.8 else CHARACTERS, k=draw.randrange(6)))


def compiled(path: str, given: str) -> xgrammar.CompiledGrammar:
    kind: Any = {"regex": "regex", "tag": "structural_tag", "xml": "structural_tag"}.get(path, "json_schema")
    content: Any = {"type": "regex", "pattern": given}
    schema: Any = {"type": "string", "pattern": given}
    if path == "key":
        schema = {"type": "object", "patternProperties": {given: {"type": "null"}}, "minProperties": 1}
    elif path == "name":
        schema = {"propertyNames": schema, "additionalProperties": {"type": "null"}, "minProperties": 1}
    elif path == "xml":
        schema = {"type": "object", "properties": {"v": schema}, "required": ["v"]}
        content = {"type": "json_schema", "style": "qwen_xml"}
    text = given
    if path != "regex" and path != "tag":
        text = checked_schema(schema, 32)
    if path == "xml":
        content["json_schema"] = json.loads(text)
    if kind == "structural_tag":
        text = json.dumps({"type": "structural_tag", "format": content})
    return COMPILER.compile(Grammar(kind, text, eos_token_ids(), any_whitespace=False))


def allows(grammar: xgrammar.CompiledGrammar, path: str, text: str, raw: str | None = None) -> bool:
    """Return whether `text` is possible in its place in a whole answer. raw: what JSON has between the quotes."""
    quoted = json.dumps(text, ensure_ascii=False) if raw is None else f'"{raw}"'
    if path == "xml":
        text = f"<parameter=v>{text}</parameter>"
    elif path in ("value", "key", "name"):
        text = quoted if path == "value" else f"{{{quoted}: null}}"
    matcher = xgrammar.GrammarMatcher(grammar)
    return (not text or matcher.accept_string(text)) and matcher.accept_token(eos_token_ids()[0])


def check(path: str, seeds: range) -> None:
    num_matches = num_others = 0
    for seed in seeds:
        draw = random.Random(seed)
        given = pattern(draw, 2)
        if not given:
            continue
        grammar = compiled(path, given)
        for text in texts(draw, given):
            matches = re.fullmatch(given, text) is not None
            if path not in ("regex", "tag"):  # a schema's pattern: without what JSON writes with escapes
                assert not set(text) & set('"\\') or not allows(grammar, path, text, text), (path, seed, given, text)
                matches = matches and not set(text) & set('"\\')
            assert allows(grammar, path, text) == matches, (path, seed, given, text)
            num_matches, num_others = num_matches + matches, num_others + (not matches)
    assert min(num_matches, num_others) > 2 * len(seeds)


@pytest.mark.parametrize("path", PATHS)
def test_random_patterns_admit_what_they_match(path: str) -> None:
    check(path, SHORT)


@pytest.mark.parametrize("path", PATHS)
def test_random_large_repetitions_admit_what_they_match(path: str) -> None:
    draw, num_matches = random.Random(1), 0
    for _ in range(60):
        atoms = draw.choices(["x", "y", "[xy]", r"\d", "(?:xy|1)", "(?:x?y|)"], k=draw.randrange(1, 4))
        given = "".join(atom + draw.choice(["?", "*", "{0,200}", "{2,300}", "{130,}"]) for atom in atoms)
        grammar = compiled(path, given)
        for text in texts(draw, "xy1"):
            matches = re.fullmatch(given, text) is not None
            assert allows(grammar, path, text) == matches, (given, text)
            num_matches += matches
    assert num_matches > 60


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_many_random_patterns_admit_what_they_match(path: str) -> None:
    check(path, LONG)


@pytest.mark.parametrize(
    "given",
    [
        r"^.{1,200}$",
        r"^[^x]{0,200}$",
        r"^[\w\s]{1,300}$",
        r"^[ -~]{1,200}$",
        r"^é\S$",
        r"^[ä-ü]*[^\]-]+$",
        "^a[\t-é]?$",
    ],
)
def test_strings_with_a_pattern_are_json(given: str) -> None:
    """No raw quotes, backslashes and control characters."""
    grammar = compiled("value", given)
    for text in ('"', "\\", "\n", "\t", 'é"', "é\\", 'a"', "a\n", "a\\"):
        assert not allows(grammar, "value", text, raw=text)
    assert any(allows(grammar, "value", text) for text in ("a", "éa", "üb"))


GROUPS = [
    (r"^a(?:xy+)?b$", ["ab", "axyyb"], ["ayb", "axb", "ayyb"]),
    (r"^a(?:x\d+)?b$", ["ab", "ax12b"], ["a1b"]),
    (r"^\d{2}(?:\.\d+)?Z$", ["12Z", "12.5Z"], ["125Z"]),
    (r"^a(?:y*x)?b$", ["ab", "ayxb"], ["ayb"]),
    (r"^(?:\d{2}x+|){2,}$", ["", "12x", "12x34xx"], ["x"]),
    (r"^(?:(?:z+){2,}|y)+$", ["zzy", "zz"], ["zy"]),
    (r"^(?:x{2,}|y{2,}|)*?z$", ["z", "xxyyz"], ["xz", "xxyz"]),
    (r"^([)]+\)|\(+)?b$", ["b", ")))b", "((b"], [")b"]),
    (r"^(x{0,200}1)?$", ["", "1", "xx1"], ["x", "xx"]),
    (r"^(?:\d{0,200}|x{0,200}z)$", ["", "12", "xz"], ["x", "1x", "x1"]),
    (r"^x*y{2,300}$", ["yy", "xyy"], ["yxyxx", "yyx", "y"]),
    (r"[xy]+\d{130,}", ["x" + "1" * 130], ["x1", "x1x" + "1" * 130]),
    (r"^(?:ab+){40,200}$", ["abb" * 40], ["ab" * 39, "b" * 40]),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("given", "right", "wrong"), GROUPS, ids=lambda value: str(value)[:30])
def test_groups_are_repeated_whole(path: str, given: str, right: list[str], wrong: list[str]) -> None:
    grammar = compiled(path, given)
    assert [allows(grammar, path, text) for text in right] == [True] * len(right)
    assert [allows(grammar, path, text) for text in wrong] == [False] * len(wrong)


@pytest.mark.parametrize("given", ["x*+y", "x+{2}", "(a)?*", "x{2}{3}", "x???", "[+]++"])
def test_quantifiers_of_quantifiers_are_refused(given: str) -> None:
    assert "quantifier after a quantifier" in (pattern_fault(given) or "")
    with pytest.raises(UnsupportedSchemaError, match="quantifier"):
        checked_schema({"pattern": given}, 32)


@pytest.mark.parametrize("given", [r"\*+", "[*+]{2}", "x*?y", "x{2,}?", r"(?:a)??", r"\{+?(?P<n>a)", "a{x}+"])
def test_lazy_and_escaped_quantifiers_are_not(given: str) -> None:
    assert pattern_fault(given) is None
