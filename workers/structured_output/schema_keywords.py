"""The enforced keywords of JSON Schema, by type, the constraints on each alone, and what a `$ref` refers to within its
schema. Read by `aerie.workers.structured_output.json_schema`; plain values, no torch."""

import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

# Annotations, which do not restrict instances (JSON Schema 2020-12, Validation, sections 7 to 9).
ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "discriminator",
        "$comment",
        "$schema",
        "$id",
        "$anchor",
        "id",
    }
)
DEFINITIONS = ("$defs", "definitions")
# Enforced keywords that restrict instances, by type.
KEYWORDS_OF_TYPE: dict[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "array": frozenset({"items", "additionalItems", "prefixItems", "minItems", "maxItems", "unevaluatedItems"}),
    "object": frozenset(
        {
            "properties",
            "required",
            "additionalProperties",
            "patternProperties",
            "propertyNames",
            "minProperties",
            "maxProperties",
            "unevaluatedProperties",
        }
    ),
    "boolean": frozenset(),
    "null": frozenset(),
}
KEYWORDS_OF_TYPE["integer"] = KEYWORDS_OF_TYPE["number"]
UNIONS = ("anyOf", "oneOf", "allOf")
ENFORCED = frozenset({"type", "enum", "const", "$ref", *UNIONS, *DEFINITIONS}).union(*KEYWORDS_OF_TYPE.values())
FORMATS = frozenset(
    {
        "date",
        "time",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uri",
        "uuid",
        "json-pointer",
    }
)
REMEDIES = {
    "nullable": 'write "type": ["string", "null"]',
    "dependencies": "write one schema of anyOf for each case",
    "if": "write one schema of anyOf for each case",
    "not": "say what is allowed",
    "uniqueItems": "check the answer, or list what is allowed with enum",
}
Schema = dict[str, Any]
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_STEP = Decimal("0.000001")
MAX_WHOLE_BOUND, MAX_FRACTIONAL_BOUND = 2**53, 2**33  # bounds that a double represents exactly, with six decimals
_PREFIX = re.compile(r"\^([A-Za-z0-9_/-]+)(?:\.\*\$?)?")  # a pattern that gives a name's prefix
_HALF = re.compile(r"(?<!\\)(?:\\\\)*(\\u\{?[dD][89a-fA-F][0-9a-fA-F]{2}\}?)")
_ATOMS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)  # what may contain a quantifier's characters
_REPEATED_QUANTIFIER = re.compile(r"(?:[*+?]|\{[\d,]*\})(?:\?[*+?{]|[*+{])")


class UnsupportedSchemaError(ValueError):
    """A schema that is not completely enforced. keyword: the unsupported part; "" for its size. path: its JSON
    pointer."""

    def __init__(self, path: str, keyword: str, reason: str) -> None:
        super().__init__(f"{keyword + ' ' if keyword else ''}at {path or '#'}: {reason}")
        self.path = path
        self.keyword = keyword


def check_alone(schema: Mapping[str, Any], keyword: str, path: str, allowed: tuple[str, ...]) -> None:
    """Raise for keywords that are not enforced together with `keyword`."""
    for key in schema:
        if key != keyword and key not in allowed:
            raise UnsupportedSchemaError(path, key, f"not enforced together with {keyword}; leave one of the two out")


def check_counts(schema: Schema, names: tuple[str, ...], path: str) -> None:
    for name in names:
        if name in schema and (type(schema[name]) is not int or schema[name] < 0):
            raise UnsupportedSchemaError(path, name, "must be a whole number of at least 0")


def pattern_fault(pattern: Any) -> str | None:
    r"""Return why a regular expression is refused; None if it is not. Escaped halves of surrogate pairs, such as
    JavaScript's \ud83d\ude00, become invalid UTF-8 in the compiler. A quantifier after another is an error in
    JavaScript, and in Python it forbids backtracking; the compiler repeats what was repeated."""
    if not isinstance(pattern, str):
        return None
    if match := _HALF.search(pattern):
        return f"{match[1]} is half of a character; write the character itself"
    if match := _REPEATED_QUANTIFIER.search(_ATOMS.sub("x", pattern)):
        return f"{match[0]} has a quantifier after a quantifier; put a group around the first"
    return None


def check_pattern(pattern: Any, keyword: str, path: str) -> None:
    if fault := pattern_fault(pattern):
        raise UnsupportedSchemaError(path, keyword, fault)


def check_string(schema: Schema, path: str) -> None:
    """Raise UnsupportedSchemaError for keywords of a string's schema that would not be enforced."""
    check_pattern(schema.get("pattern"), "pattern", path)
    check_counts(schema, ("minLength", "maxLength"), path)
    known = schema.get("format")
    if known is not None and known not in FORMATS:
        raise UnsupportedSchemaError(
            path, "format", f"{known!r} is not enforced; known are {', '.join(sorted(FORMATS))}"
        )
    demand = next((name for name in ("pattern", "format") if name in schema), None)
    other = next((name for name in ("minLength", "maxLength") if name in schema), None)
    if demand is not None and other is not None:
        raise UnsupportedSchemaError(path, other, f"not enforced together with {demand}; put it into a pattern")


def check_patterns(names: Mapping[str, Any], patterns: Iterable[str], path: str) -> None:
    """Raise if one name may be described twice, by `properties` and patterns, because the compiler would use only one.

    Only the prefixes of patterns are compared, because a search with a client's pattern may take forever.
    """
    for pattern in patterns:
        check_pattern(pattern, "patternProperties", path)
    prefixes = [_PREFIX.fullmatch(pattern) for pattern in patterns]
    known = [match[1] for match in prefixes if match]
    if (len(prefixes) > 1 or names) and len(known) < len(prefixes):
        reason = "with properties or other patterns, only patterns of a prefix are enforced, such as ^x-"
        raise UnsupportedSchemaError(path, "patternProperties", reason)
    for i, prefix in enumerate(known):
        for other in [*names, *known[:i], *known[i + 1 :]]:
            if other.startswith(prefix):
                reason = f"{prefix!r} overlaps with {other!r}; describe each name once"
                raise UnsupportedSchemaError(path, "patternProperties", reason)


def check_number(schema: Schema, kind: str, path: str) -> None:
    """Raise UnsupportedSchemaError for keywords of a number's schema that would not be enforced. kind: "number" or
    "integer"."""
    for name in KEYWORDS_OF_TYPE["number"]:
        if name in schema and type(schema[name]) not in (int, float):
            raise UnsupportedSchemaError(path, name, "must be a number")
    if "multipleOf" in schema and (kind == "number" or len(schema) > 2):
        raise UnsupportedSchemaError(path, "multipleOf", "it is enforced of integers without bounds alone")
    if kind == "number":
        _check_bounds(schema, path)


def _check_bounds(schema: Schema, path: str) -> None:
    """Raise for bounds that the compiler rounds: xgrammar 0.2.8 writes them with six decimals of a double, and allows
    the empty text if no such number is between them."""
    bounds = {name: Decimal(repr(schema[name])) for name in _BOUNDS if name in schema}
    for name, bound in bounds.items():
        limit = MAX_WHOLE_BOUND if bound == bound.to_integral_value() else MAX_FRACTIONAL_BOUND
        if abs(bound) > limit or bound % _STEP:
            reason = "it is enforced to six decimals, and of whole numbers up to 2**53, others up to 2**33; round it"
            raise UnsupportedSchemaError(path, name, reason)
    low = max((bounds[name] for name in _BOUNDS[:2] if name in bounds), default=None)
    high = min((bounds[name] for name in _BOUNDS[2:] if name in bounds), default=None)
    num_exclusive = sum(name in bounds for name in ("exclusiveMinimum", "exclusiveMaximum"))
    if low is not None and high is not None and high - low < num_exclusive * _STEP:
        raise UnsupportedSchemaError(path, "", "no number of six decimals is between the bounds")


def check_values(values: Any, keyword: str, path: str) -> None:
    """Raise for whole numbers in the values of an enum or const that the compiler would round."""
    if isinstance(values, list | dict):
        for value in values.values() if isinstance(values, dict) else values:
            check_values(value, keyword, path)
    elif isinstance(values, int) and not -(2**63) <= values < 2**63:
        raise UnsupportedSchemaError(path, keyword, f"{str(values)[:40]} has more than 64 bits; write it as a string")


def check_repeats(schema: Schema, path: str) -> None:
    """Raise for a minimum number of properties with free names, because a repeated name would count twice."""
    if schema.get("minProperties", 0) > 1 and not (
        "properties" in schema
        and "patternProperties" not in schema
        and schema.get("additionalProperties", False) is False
        and schema.get("unevaluatedProperties", False) is False
    ):
        reason = "above 1 it is enforced of the names in properties alone; additionalProperties: false leaves those"
        raise UnsupportedSchemaError(path, "minProperties", reason)


def is_of(value: Any, kind: str) -> bool:
    """Return whether a JSON value has a JSON Schema type."""
    match kind:
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            if isinstance(value, float):
                return value.is_integer()  # false for infinity, which JSON may write as 1e999
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case "array":
            return isinstance(value, list)
    return isinstance(value, dict)


_NAMES = ("$id", "id", "$anchor")
_VALUES = ("const", "enum", "default", "examples", "example")  # keywords with values, which are not schemas


class References:
    """The parts of a schema by name: JSON pointers, `$id` as it is written, and `$anchor`."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._named: dict[str, tuple[str, Any]] = {}
        self._resources: list[str] = []  # below these, # means the part with the $id instead of the whole schema
        for path, part in _parts(schema, "#"):
            for key in _NAMES:
                name = part.get(key)
                if isinstance(name, str):
                    self._named.setdefault(f"#{name}" if key == "$anchor" else name, (path, part))
                    if key != "$anchor" and path != "#" and not name.startswith("#"):
                        self._resources.append(f"{path}/")

    def found(self, target: Any, path: str) -> tuple[str, Any]:
        """Return the place of a reference's target, and the target. path: place of the reference. Raises
        UnsupportedSchemaError."""
        if not isinstance(target, str):
            raise UnsupportedSchemaError(path, "$ref", f"{target!r}: must be a string")
        if target in self._named:
            return self._named[target]
        if target != "#" and not target.startswith("#/"):
            reason = f"{target!r}: nothing in the schema has this name; a reference must lead to a part of the schema"
            raise UnsupportedSchemaError(path, "$ref", reason)
        if any(f"{path}/".startswith(resource) for resource in self._resources):
            reason = f"{target!r}: is inside of a part with a $id, which it would start from; refer to that $id"
            raise UnsupportedSchemaError(path, "$ref", reason)
        location, part = "#", self._schema
        for step in unquote(target).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            location = f"{location}/{name}"
            if isinstance(part, list) and name.isascii() and name.isdigit() and int(name) < len(part):
                part = part[int(name)]
            elif isinstance(part, dict) and name in part:
                part = part[name]
            else:
                raise UnsupportedSchemaError(path, "$ref", f"{target!r}: nothing is there")
        return location, part

    def followed(self, schema: Any, path: str) -> tuple[str, Any]:
        """Return the place and the schema at the end of a chain of references; `schema` itself if it is none. Raises
        UnsupportedSchemaError."""
        seen = set[str]()
        while isinstance(schema, dict) and "$ref" in schema:
            target = schema["$ref"]
            path, schema = self.found(target, path)
            if path in seen:
                raise UnsupportedSchemaError(path, "$ref", f"{target!r} leads to itself")
            seen.add(path)
        return path, schema


def _parts(value: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each object in a schema with its path, except those that are values: constants, enumerations, defaults,
    examples."""
    pending = [(path, value)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict):
            yield path, value
            pending += [(f"{path}/{key}", item) for key, item in value.items() if key not in _VALUES]
        elif isinstance(value, list):
            pending += [(f"{path}/{i}", item) for i, item in enumerate(value)]
