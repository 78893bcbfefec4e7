"""Grammars that may be anything: of all of Unicode, with nested repetitions, recursion and empty alternatives; and
those that are known to be hard. For hypothesis."""

import json

from hypothesis import strategies as st

from aerie.workers.scheduling.plan import Grammar
from aerie.workers.structured_output.json_schema import UnsupportedSchemaError, checked_schema
from tests.support.embedded import eos_token_ids

STOPS = eos_token_ids()
_EXPRESSION = {
    "type": "object",
    "properties": {"op": {"enum": ["+", "-"]}, "left": {"$ref": "#/$defs/n"}, "right": {"$ref": "#/$defs/n"}},
    "required": ["op", "left", "right"],
    "additionalProperties": False,
}
# schemas in which there is much to search for a guide
RECURSIVE = {
    name: {"$ref": "#/$defs/n", "$defs": {"n": node}}
    for name, node in (
        ("lists in lists", {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1}),
        ("expressions", {"anyOf": [{"type": "number"}, {"type": "string"}, _EXPRESSION]}),
    )
}
KNOWN = (
    Grammar("regex", "(([a-z ]{0,50}){0,50}){0,50}", STOPS),
    Grammar("ebnf", 'root ::= s s s\ns ::= [a-z ] | s s | s s s | ""', STOPS),
    Grammar("regex", "([A-Za-z ,.]{1,200}\\n?){1,20}", STOPS),
    Grammar("regex", "(a|aa|aaa|aaaa)*(a|aa)*(aaa|a)*", STOPS),
    Grammar("regex", "((.*)*)*", STOPS),
    Grammar("ebnf", 'root ::= root root | "a" | ""', STOPS),
    Grammar("ebnf", 'root ::= e\ne ::= e "+" e | e "*" e | "(" e ")" | [0-9] | ""', STOPS),
    Grammar("ebnf", 'root ::= [^a] | "a" s\ns ::= "a" s', STOPS),  # once in s, never out
    Grammar("ebnf", 'root ::= [^a] | "a" ((("a"){8,}){8,}){8,}', STOPS),
    *(Grammar("json_schema", checked_schema(schema, 32), STOPS) for schema in RECURSIVE.values()),
)

letters = st.characters(exclude_categories=("Cs",))  # a JSON document holds no surrogates
texts = st.text(letters, min_size=1, max_size=6)
_plain = texts.map(
    lambda text: "".join("\\" + c if c in r"\.^$|?*+()[]{}/-" else c for c in text if c.isprintable()) or "a"
)
_classes = st.sampled_from(["[a-z]", "[a-z ]", ".", "[^\\n]", "\\d", "\\w", "[а-я]", "[一-龥]", "[😀-🙏]"])


def _more(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    count = st.integers(0, 60)
    repeated = st.tuples(inner, count, count).map(lambda t: f"({t[0]}){{{min(t[1:])},{max(t[1:])}}}")
    return st.one_of(
        repeated,
        st.tuples(inner, st.sampled_from("*+?")).map(lambda t: f"({t[0]}){t[1]}"),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: "(" + "|".join(parts) + ")"),
        inner.map(lambda part: f"({part}|)"),
        st.lists(inner, min_size=2, max_size=3).map("".join),
    )


regexes = st.recursive(st.one_of(_plain, _classes), _more, max_leaves=5)


_names = st.sampled_from(["root", "s", "t"])
_terminals = st.one_of(
    texts.map(lambda text: json.dumps(text)),
    texts.map(lambda text: json.dumps(text, ensure_ascii=False)),
    letters.map(lambda c: f'"\\U{ord(c):08x}"'),
    st.tuples(letters, letters).map(lambda t: f"[\\U{ord(min(t)):08x}-\\U{ord(max(t)):08x}]"),
    st.sampled_from(['""', "[a-z ]", "[а-я]", "[一-龥]", "[😀-🙏]", "[0-9]", "[^a]", "[^\\n]", "[^а-я]"]),
)


def _more_of_a_rule(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    count = st.integers(0, 60)
    return st.one_of(
        st.tuples(inner, st.sampled_from("*+?")).map(lambda t: f"({t[0]}){t[1]}"),
        st.tuples(inner, count, count).map(lambda t: f"({t[0]}){{{min(t[1:])},{max(t[1:])}}}"),
        st.tuples(inner, count).map(lambda t: f"({t[0]}){{{t[1]},}}"),
        st.lists(inner, min_size=2, max_size=4).map(" ".join),
        st.lists(inner, min_size=2, max_size=4).map(lambda parts: "(" + " | ".join(parts) + ")"),
    )


_bodies = st.recursive(st.one_of(_names, _terminals), _more_of_a_rule, max_leaves=8)


@st.composite
def ebnfs(draw: st.DrawFn) -> str:
    """Rules that may call each other, and themselves, anywhere; some are missing."""
    names = ["root", "s", "t"][: draw(st.sampled_from([1, 2, 3, 3, 3]))]
    return "\n".join(f"{name} ::= " + " | ".join(draw(st.lists(_bodies, min_size=1, max_size=4))) for name in names)


_leaf = st.one_of(
    st.just({"type": "string"}),
    st.tuples(st.integers(0, 40), st.integers(0, 400)).map(
        lambda t: {"type": "string", "minLength": t[0], "maxLength": sum(t)}
    ),
    st.just({"type": "integer"}),
    st.just({"type": "number"}),
    st.just({"type": "boolean"}),
    st.lists(st.text(letters, max_size=6), min_size=1, max_size=5, unique=True).map(lambda names: {"enum": names}),
    regexes.map(lambda pattern: {"type": "string", "pattern": pattern}),
)
schemas = st.recursive(
    _leaf,
    lambda inner: st.one_of(
        st.dictionaries(st.text(letters, max_size=4), inner, max_size=3).map(
            lambda each: {
                "type": "object",
                "properties": each,
                "required": list(each)[:1],
                "additionalProperties": False,
            }
        ),
        st.tuples(inner, st.integers(0, 30)).map(lambda t: {"type": "array", "items": t[0], "maxItems": t[1]}),
        st.lists(inner, min_size=1, max_size=3).map(lambda each: {"anyOf": each}),
    ),
    max_leaves=4,
)


def _of_schema(schema: object) -> Grammar | None:
    try:
        return Grammar("json_schema", checked_schema(schema, 32), STOPS)
    except UnsupportedSchemaError:
        return None


grammars: st.SearchStrategy[Grammar] = st.one_of(
    st.sampled_from(KNOWN),
    regexes.map(lambda text: Grammar("regex", text, STOPS)),
    ebnfs().map(lambda text: Grammar("ebnf", text, STOPS)),
    st.lists(texts, min_size=1, max_size=6, unique=True).map(lambda each: Grammar("choice", json.dumps(each), STOPS)),
    schemas.map(_of_schema).filter(lambda found: found is not None),  # type: ignore[arg-type]
)
