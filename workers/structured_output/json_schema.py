"""Rewrites JSON schemas for the compiler; refuses those that it would not enforce completely. Called by the API's
validation; plain values, no torch.

xgrammar (0.2.8) drops unknown keywords, and some combinations, silently or with a line on stderr. Here a schema is
rewritten so that all of it is enforced, or refused with keyword and remedy. The enforced language may be narrower than
the schema, never wider: unnamed properties do not occur, a pattern describes the whole string, keywords of one type
imply that type, and `oneOf` becomes `anyOf` only if its branches exclude each other.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from aerie.workers.structured_output.schema_keywords import (
    ANNOTATIONS,
    DEFINITIONS,
    ENFORCED,
    KEYWORDS_OF_TYPE,
    REMEDIES,
    UNIONS,
    References,
    Schema,
    UnsupportedSchemaError,
    check_alone,
    check_counts,
    check_number,
    check_patterns,
    check_repeats,
    check_string,
    check_values,
    is_of,
)
from aerie.workers.structured_output.schema_patterns import compiled_form, handed_over, without_lengths

MAX_ALTERNATIVES = 1024  # maximum alternatives of all branches together
_TYPES = ("string", "number", "boolean", "null", "array", "object")


class _Alternatives:
    """The parts of branches that are no unions and no references, as (branch, schema)."""

    def __init__(self, references: References, branches: Sequence[Any], path: str) -> None:
        self._references = references
        self._num_parts = 0
        self.leaves = [(i, leaf) for i, branch in enumerate(branches) for leaf in self._leaves(branch, path, ())]

    def _leaves(self, schema: Any, path: str, outer: tuple[str, ...]) -> Iterator[Schema]:
        """Yield the alternatives of a schema without unions. {}: anything. outer: locations of the enclosing
        references, to find recursion."""
        path, schema = self._references.followed(schema, path)
        self._num_parts += 1
        if path in outer or self._num_parts > MAX_ALTERNATIVES or not isinstance(schema, dict):
            yield {}  # anything
            return
        union = next((name for name in UNIONS if isinstance(schema.get(name), list)), None)
        if union is None or (union == "allOf" and len(schema[union]) > 1):
            yield schema
            return
        for branch in schema[union]:
            is_reference = isinstance(branch, dict) and "$ref" in branch
            yield from self._leaves(branch, path, (*outer, path) if is_reference else outer)

    def values(self, schema: Any, path: str) -> frozenset[tuple[str, Any]] | None:
        """Return all scalar values of a schema, with their types; None if they are not listed."""
        _, schema = self._references.followed(schema, path)
        if not isinstance(schema, dict):
            return None
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if not isinstance(listed, list) or any(isinstance(value, list | dict) for value in listed):
            return None
        return frozenset((next(kind for kind in _TYPES if is_of(value, kind)), value) for value in listed)


def discriminator(references: References, branches: Sequence[Any], path: str) -> str | None:
    """Return a property whose value says which branch of a union an object belongs to, because each branch lists other
    values for it. Return "" if types and values alone show that at most one branch is valid, None if nothing shows it.

    references: resolves the branches' references.
    path: place of the union. Raises UnsupportedSchemaError for invalid references.
    """
    alternatives = _Alternatives(references, branches, path)
    objects: list[tuple[int, Schema]] = []
    for kind in _TYPES:
        leaves_of_kind = [(i, leaf) for i, leaf in alternatives.leaves if kind in _types(leaf)]
        is_shared = len({i for i, _ in leaves_of_kind}) > 1 and any(
            kind in _enforced_types(leaf) for _, leaf in leaves_of_kind
        )
        if is_shared and kind == "object":
            objects = leaves_of_kind
        elif is_shared and not _differ([(i, alternatives.values(leaf, path)) for i, leaf in leaves_of_kind], kind):
            return None
    if not objects:
        return ""
    if any(_enforced_types(leaf) != {"object"} or not isinstance(leaf.get("properties"), dict) for _, leaf in objects):
        return None
    described = [(i, leaf["properties"]) for i, leaf in objects]
    for name in described[0][1]:
        if all(name in properties for _, properties in described):
            named = [(i, alternatives.values(properties[name], path)) for i, properties in described]
            if all(_differ(named, kind) for kind in _TYPES):
                return str(name)
    return None


def _differ(listed: Sequence[tuple[int, frozenset[tuple[str, Any]] | None]], kind: str) -> bool:
    """Return whether no value of type `kind` is listed by two branches. listed: pairs of branch and values."""
    owner: dict[Any, int] = {}
    for branch, values in listed:
        if values is None:
            return False
        if any(owner.setdefault(value, branch) != branch for kind_of_value, value in values if kind_of_value == kind):
            return False
    return True


def _types(schema: Schema) -> frozenset[str]:
    """Return the types that a schema admits."""
    if "const" in schema or isinstance(schema.get("enum"), list):
        listed = [schema["const"]] if "const" in schema else schema["enum"]
        return frozenset(kind for kind in _TYPES for value in listed if is_of(value, kind))
    declared = schema.get("type", _TYPES)
    kinds = declared if isinstance(declared, list | tuple) else [declared]
    return frozenset("number" if kind == "integer" else kind for kind in kinds if isinstance(kind, str))


def _enforced_types(schema: Schema) -> frozenset[str]:
    """Return the types of the answers: a schema without a type has those of its keywords."""
    implied = [kind for kind in ("string", "number", "array", "object") if KEYWORDS_OF_TYPE[kind] & schema.keys()]
    if "type" not in schema and "const" not in schema and "enum" not in schema and implied:
        return frozenset(implied)
    return _types(schema)


def checked_schema(schema: Any, max_depth: int) -> str:
    """Return the schema for the compiler, as JSON. max_depth: maximum nesting of schemas. Raises
    UnsupportedSchemaError."""
    return json.dumps(_Writer(schema, max_depth).root(), ensure_ascii=False, separators=(",", ":"))


class _Writer:
    """Rewrites one schema."""

    def __init__(self, schema: Any, max_depth: int) -> None:
        self._schema = schema
        self._max_depth = max_depth
        self._references = References(schema)
        self._names: dict[tuple[str, frozenset[str]], str] = {}  # names of written definitions, by (location, `more`)
        self._pending: list[
            tuple[str, str, Any, frozenset[str]]
        ] = []  # definitions to write: name, place, schema, more

    def root(self) -> Any:
        """Return the whole schema. What is referred to, wherever it stands, becomes a definition."""
        written, definitions = self._written(self._schema, "#", 1), dict[str, Any]()
        while self._pending:
            name, path, schema, more = self._pending.pop()
            definitions[name] = self._written(schema, path, 1, more)
        return {"$defs": definitions, **written} if definitions else written

    def _written(self, schema: Any, path: str, depth: int, more: frozenset[str] = frozenset()) -> Any:
        """Return a schema as the compiler takes it. Raises UnsupportedSchemaError. path: of the schema, for errors.
        more: properties that objects require, too."""
        if depth > self._max_depth:
            raise UnsupportedSchemaError(path, "", f"schemas are nested more than {self._max_depth} deep; flatten it")
        if schema is True:
            return {}
        if schema is False:
            raise UnsupportedSchemaError(path, "false", "nothing would be valid; leave out what may not occur")
        if not isinstance(schema, dict):
            raise UnsupportedSchemaError(path, "", "a schema must be an object or true")
        schema = {key: value for key, value in schema.items() if not self._is_silent(schema, key, path)}
        return self._without_annotations(schema, path, depth, more)

    def _is_silent(self, schema: Schema, key: str, path: str) -> bool:
        """Return whether a keyword requires nothing. Raises for a keyword that is not enforced."""
        if key in ANNOTATIONS or key in DEFINITIONS or key.startswith("x-"):
            return True
        if (key, schema[key]) in (("uniqueItems", False), ("nullable", False)):
            return True
        if key == "strict" and isinstance(schema[key], bool):
            return True  # OpenAI's keyword for functions, often put into their parameters
        if key == "format" and not self._may_be_text(schema):
            return True  # int32, double: OpenAPI's names for what `type` says
        if key not in ENFORCED:
            raise UnsupportedSchemaError(path, key, f"it is not enforced; {REMEDIES.get(key, 'leave it out')}")
        return False

    @staticmethod
    def _may_be_text(schema: Schema) -> bool:
        declared = schema.get("type", "string")
        return "string" in declared if isinstance(declared, list) else bool(declared == "string")

    def _without_annotations(self, schema: Schema, path: str, depth: int, more: frozenset[str]) -> Schema:
        """Rewrite a schema by its kind: a reference, a constant, an enumeration, a union or a type.

        path: of the schema, for errors. depth: nesting so far. more: properties that objects require, too.
        """
        if "$ref" in schema:
            return self._reference(schema, path, more)
        if "const" in schema:
            return self._enum({**schema, "enum": [schema["const"]]}, path, "const")
        if "enum" in schema:
            return self._enum(schema, path, "enum")
        union = next((name for name in UNIONS if name in schema), None)
        if union is not None:
            return self._union(schema, union, path, depth, more)
        return self._typed(schema, path, depth, more)

    def _reference(self, schema: Schema, path: str, more: frozenset[str]) -> Schema:
        """Return a reference to a definition, which is rewritten later, once for each `more`."""
        check_alone(schema, "$ref", path, allowed=())
        location, target = self._references.followed(schema, path)
        if location == "#" and not more:
            return {"$ref": "#"}
        if (location, more) not in self._names:
            name = re.sub(r"[^A-Za-z0-9_]", "_", location.rpartition("/")[2]) or "_"
            while name in self._names.values():
                name += "_"
            self._names[location, more] = name
            self._pending.append((name, location, target, more))
        return {"$ref": f"#/$defs/{self._names[location, more]}"}

    def _enum(self, schema: Schema, path: str, keyword: str) -> Schema:
        """Return the schema with only those values that have its `type`."""
        check_alone(schema, keyword, path, allowed=("type", "enum", "const"))
        values = schema["enum"]
        if not isinstance(values, list):
            raise UnsupportedSchemaError(path, "enum", "must be a list")
        if "type" in schema:
            types = self._types(schema, path)
            values = [value for value in values if any(is_of(value, kind) for kind in types)]
        if "const" in schema and "enum" in schema and schema["const"] not in values:
            values = []
        if not values:
            raise UnsupportedSchemaError(path, keyword, "no value would be valid")
        check_values(values, keyword, path)
        return {"enum": values}

    def _union(self, schema: Schema, name: str, path: str, depth: int, more: frozenset[str]) -> Schema:
        """Return the union of anyOf, of oneOf, or of an allOf with one schema, with the outer `type` in each member.
        A oneOf becomes an anyOf if its members are known to exclude each other; else the compiler checks it."""
        check_alone(schema, name, path, allowed=("type",))
        branches = schema[name]
        if not isinstance(branches, list) or not branches:
            raise UnsupportedSchemaError(path, name, "must be a list of at least one schema")
        if name == "allOf" and len(branches) > 1:
            raise UnsupportedSchemaError(path, "allOf", "of several schemas it is not enforced; write them as one")
        if "type" in schema:
            branches = [
                self._with_type(branch, schema["type"], f"{path}/{name}/{i}") for i, branch in enumerate(branches)
            ]
        written_as, places = name, [f"{path}/{name}/{i}" for i in range(len(branches))]
        if name == "oneOf" and (key := discriminator(self._references, branches, path)) is not None:
            written_as, more = "anyOf", more | {key} if key else more
        written = [
            self._written(branch, location, depth + 1, more) for branch, location in zip(branches, places, strict=True)
        ]
        return written[0] if name == "allOf" else {written_as: written}

    @staticmethod
    def _with_type(branch: Any, kind: Any, path: str) -> Any:
        if not isinstance(branch, dict) or branch.get("type", kind) != kind or "$ref" in branch:
            raise UnsupportedSchemaError(path, "type", "it is also next to anyOf; write it only inside anyOf")
        return {"type": kind, **branch}

    def _types(self, schema: Schema, path: str) -> list[str]:
        """Return the declared types. Raises UnsupportedSchemaError for unknown ones."""
        declared = schema["type"]
        types = declared if isinstance(declared, list) else [declared]
        if not types or not all(isinstance(kind, str) and kind in KEYWORDS_OF_TYPE for kind in types):
            raise UnsupportedSchemaError(
                path, "type", f"{declared!r}: must be one of {', '.join(sorted(KEYWORDS_OF_TYPE))}"
            )
        return types

    def _typed(self, schema: Schema, path: str, depth: int, more: frozenset[str]) -> Schema:
        """Return a union with one schema per type, because the compiler reads keywords only beside a single type."""
        if "type" in schema:
            types = self._types(schema, path)
        else:
            kinds = ("string", "number", "array", "object")
            types = [kind for kind in kinds if KEYWORDS_OF_TYPE[kind] & schema.keys()]
            if not types:
                return {}
        known = {"type"}.union(*(KEYWORDS_OF_TYPE[kind] for kind in types))
        for key in schema:
            if key not in known:
                raise UnsupportedSchemaError(path, key, f"it has no effect on {' or '.join(types)}; leave it out")
        written = [self._for_type(schema, kind, path, depth, more) for kind in types]
        return written[0] if len(written) == 1 else {"anyOf": written}

    def _for_type(self, schema: Schema, kind: str, path: str, depth: int, more: frozenset[str]) -> Schema:
        """Return the keywords of `schema` that apply to the type `kind`, rewritten."""
        written: Schema = {"type": kind} | {key: schema[key] for key in schema if key in KEYWORDS_OF_TYPE[kind]}
        match kind:
            case "string":
                if "pattern" in written:  # with a pattern, the format is only its name, as zod writes it
                    written.pop("format", None)
                    written["pattern"] = compiled_form(written["pattern"])
                written = without_lengths(written)
                check_string(written, path)
                if "pattern" in written:
                    written["pattern"] = handed_over(written["pattern"])
            case "number" | "integer":
                check_number(written, kind, path)
            case "array":
                return self._array(written, path, depth)
            case "object":
                return self._object(written, path, depth, more)
        return written

    def _array(self, part: Schema, path: str, depth: int) -> Schema:
        """Rewrite the keywords of arrays: `items`, `prefixItems` and `unevaluatedItems`."""
        check_counts(part, ("minItems", "maxItems"), path)
        if isinstance(part.get("items"), list):
            part = self._as_2020_12(part, path)
        if "additionalItems" in part:
            raise UnsupportedSchemaError(path, "additionalItems", "it is only for a list of items; write items")
        if "prefixItems" in part:
            if not isinstance(part["prefixItems"], list):
                raise UnsupportedSchemaError(path, "prefixItems", "must be a list of schemas")
            prefix = enumerate(part["prefixItems"])
            part["prefixItems"] = [self._written(item, f"{path}/prefixItems/{i}", depth + 1) for i, item in prefix]
        elif "items" not in part and "unevaluatedItems" not in part:
            part["items"] = {}  # the compiler would allow no items
        for name in ("items", "unevaluatedItems"):
            if part.get(name, False) is not False:
                part[name] = self._written(part[name], f"{path}/{name}", depth + 1)
        return part

    @staticmethod
    def _as_2020_12(part: Schema, path: str) -> Schema:
        """Convert a tuple of drafts before 2020-12, where prefixItems are called items, and items additionalItems."""
        if "prefixItems" in part:
            raise UnsupportedSchemaError(path, "prefixItems", "not with a list of items; leave one of the two out")
        others = {key: value for key, value in part.items() if key not in ("items", "additionalItems")}
        rest = {"items": part["additionalItems"]} if "additionalItems" in part else {}
        return others | {"prefixItems": part["items"]} | rest

    def _object(self, part: Schema, path: str, depth: int, more: frozenset[str]) -> Schema:
        """Rewrite the keywords of objects. more: names that are required by an enclosing schema; those among the
        properties are added to `required`."""
        check_counts(part, ("minProperties", "maxProperties"), path)
        part = self._with_listed_names(part, path)
        for name in ("properties", "patternProperties"):
            if name in part:
                part[name] = self._members(part, name, path, depth)
        names, required = part.get("properties", {}), part.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise UnsupportedSchemaError(path, "required", "must be a list of names")
        if added := sorted(more & names.keys() - set(required)):
            part["required"] = required = [*required, *added]
        check_repeats(part, path)
        check_patterns(names, part.get("patternProperties", ()), path)
        if "patternProperties" in part:
            part["patternProperties"] = {
                handed_over(pattern): value for pattern, value in part["patternProperties"].items()
            }
        for name in required:
            if name not in names:
                raise UnsupportedSchemaError(path, "required", f"{name!r} is not among properties; describe it there")
        if "propertyNames" in part and ("properties" in part or "patternProperties" in part):
            raise UnsupportedSchemaError(path, "propertyNames", "not enforced together with properties; leave it out")
        described = {"properties", "patternProperties", "propertyNames", "unevaluatedProperties"} & part.keys()
        if not described and "additionalProperties" not in part:
            part["additionalProperties"] = True
        for name in ("additionalProperties", "unevaluatedProperties", "propertyNames"):
            if isinstance(part.get(name), dict):
                part[name] = self._written(part[name], f"{path}/{name}", depth + 1)
        return part

    def _with_listed_names(self, part: Schema, path: str) -> Schema:
        """Describe each name of `propertyNames` with an enum as a property, as for a map from an enumeration."""
        if "propertyNames" not in part or {"properties", "patternProperties"} & part.keys():
            return part
        _, names = self._references.followed(part["propertyNames"], path)
        listed = names.get("enum", [names.get("const")]) if isinstance(names, dict) else []
        if not listed or not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            return part
        rest = part.get("additionalProperties", True)
        if (
            rest is False
            or {"unevaluatedProperties", "minProperties"} & part.keys()
            or {"pattern", "minLength", "maxLength"} & names.keys()
        ):
            return part
        others = {key: value for key, value in part.items() if key != "propertyNames"}
        return others | {"properties": dict.fromkeys(listed, rest), "additionalProperties": False}

    def _members(self, schema: Schema, keyword: str, path: str, depth: int) -> Schema:
        members = schema[keyword]
        if not isinstance(members, dict):
            raise UnsupportedSchemaError(path, keyword, "must be an object of schemas")
        return {name: self._written(value, f"{path}/{keyword}/{name}", depth + 1) for name, value in members.items()}
