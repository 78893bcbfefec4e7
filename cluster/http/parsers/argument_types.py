"""JSON types that a tool's schema allows for its arguments, and the JSON of values that models write without quotes.
Used by `aerie.cluster.http.parsers.xml_calls`, whose calls are not JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aerie.cluster.http.parsers.python_literals import literal_json
from aerie.cluster.http.text.json_text import parsed, repaired
from aerie.workers.structured_output.schema_keywords import OF_TYPE, UNIONS, is_of

_SCALARS = {"True": "true", "False": "false", "None": "null"}  # Python's names, which some chat templates write
_MAX_REFERENCES = 16  # a schema may refer to itself


@dataclass(frozen=True)
class ArgumentTypes:
    """by_name: types of each argument that the schema names. others: types of all other arguments. Empty: unknown."""

    by_name: Mapping[str, frozenset[str]]
    others: frozenset[str]

    @classmethod
    def unknown(cls) -> "ArgumentTypes":
        """Return the types for a function without a schema: all unknown."""
        return cls({}, frozenset())

    @classmethod
    def of_schema(cls, schema: Any) -> "ArgumentTypes":
        """Return the types of a function. schema: schema of its arguments, an object."""
        if not isinstance(schema, Mapping):
            return cls.unknown()
        named = schema.get("properties")
        properties = named if isinstance(named, Mapping) else {}
        by_name = {name: _types(each, schema, _MAX_REFERENCES) for name, each in properties.items()}
        return cls(by_name, _types(schema.get("additionalProperties"), schema, _MAX_REFERENCES))

    def of(self, name: str) -> frozenset[str]:
        """Return the JSON types of argument `name`; empty if unknown."""
        return self.by_name.get(name, self.others)


def _types(schema: Any, root: Mapping[str, Any], references: int) -> frozenset[str]:
    """Return the types that `schema` allows; empty if unknown. references: maximum number of references to follow."""
    if not isinstance(schema, Mapping):
        return frozenset()
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_referred(root, reference), root, references - 1) if references else frozenset()
    if isinstance(named := schema.get("type"), str | list):
        return frozenset([named] if isinstance(named, str) else map(str, named)) & OF_TYPE.keys()
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = schema.get("enum", [schema.get("const")])
        return frozenset(next(kind for kind in OF_TYPE if is_of(value, kind)) for value in values)
    for key in UNIONS:
        branches = schema.get(key)
        if isinstance(branches, list) and references:
            found = [_types(branch, root, references - 1) for branch in branches]
            if key == "allOf":
                return next((each for each in found if each), frozenset())
            return frozenset().union(*found) if all(found) else frozenset()
    return frozenset()


def _referred(root: Mapping[str, Any], reference: str) -> Any:
    """Return the part of `root` at a JSON pointer, None without one."""
    found: Any = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def json_value(text: str, types: frozenset[str]) -> str:
    """Return the JSON of an argument written as `text`, of one of `types`. A text that fits no other type is a string,
    so that nothing is lost.

    types: empty: any. If strings are allowed beside other types, a text that is JSON of another type is of that type.
    """
    stripped = text.strip()
    try:
        written = _written(stripped, types)
        value = json.loads(written)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    if not types or any(is_of(value, kind) for kind in types):
        # quotation marks belong to a string, unless its type is unknown
        is_text = isinstance(value, str) and "string" in types
        return json.dumps(text, ensure_ascii=False) if is_text else written
    return json.dumps(text, ensure_ascii=False) if "string" in types else written


def _written(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a text that is JSON, or an object or a list in Python. Raises ValueError."""
    written = _SCALARS.get(text, repaired(text))
    try:
        parsed(written)
    except ValueError:
        if not text.startswith(("{", "[")) and not (text.startswith("(") and "array" in types):
            raise
        return literal_json(text)
    return written
