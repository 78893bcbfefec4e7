"""Shows that the branches of a JSON schema's `oneOf` exclude each other, so that it may be written as `anyOf`. Called
by `aerie.workers.structured_output.json_schema`; plain values, no torch."""

from collections.abc import Iterator, Sequence
from typing import Any

from aerie.workers.structured_output.schema_keywords import OF_TYPE, UNIONS, Schema, is_of
from aerie.workers.structured_output.schema_references import References

MAX_ALTERNATIVES = 1024  # of all branches
_TYPES = ("string", "number", "boolean", "null", "array", "object")


class _Alternatives:
    """The parts of branches that are no unions and no references, as (branch, schema)."""

    def __init__(self, references: References, branches: Sequence[Any], path: str) -> None:
        self._references = references
        self._num_found = 0
        self.each = [(i, leaf) for i, branch in enumerate(branches) for leaf in self._leaves(branch, path, ())]

    def _leaves(self, schema: Any, path: str, outer: tuple[str, ...]) -> Iterator[Schema]:
        path, schema = self._references.followed(schema, path)
        self._num_found += 1
        if path in outer or self._num_found > MAX_ALTERNATIVES or not isinstance(schema, dict):
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
    """Return "" if the branches exclude each other by their types and values, else a property that all objects among
    them describe by different values: they exclude each other where it is required. None if neither is shown.

    path: place of the union. Raises UnsupportedSchemaError for invalid references.
    """
    found = _Alternatives(references, branches, path)
    objects: list[tuple[int, Schema]] = []
    for kind in _TYPES:
        of_kind = [(i, leaf) for i, leaf in found.each if kind in _types(leaf)]
        is_shared = len({i for i, _ in of_kind}) > 1 and any(kind in _enforced_types(leaf) for _, leaf in of_kind)
        if is_shared and kind == "object":
            objects = of_kind
        elif is_shared and not _differ([(i, found.values(leaf, path)) for i, leaf in of_kind], kind):
            return None
    if not objects:
        return ""
    if any(_enforced_types(leaf) != {"object"} or not isinstance(leaf.get("properties"), dict) for _, leaf in objects):
        return None
    described = [(i, leaf["properties"]) for i, leaf in objects]
    for name in described[0][1]:
        if all(name in properties for _, properties in described):
            named = [(i, found.values(properties[name], path)) for i, properties in described]
            if all(_differ(named, kind) for kind in _TYPES):
                return str(name)
    return None


def _differ(listed: Sequence[tuple[int, frozenset[tuple[str, Any]] | None]], kind: str) -> bool:
    """Return whether no value of type `kind` is listed by two branches. listed: pairs of branch and values."""
    owner: dict[Any, int] = {}
    for branch, values in listed:
        if values is None:
            return False
        if any(owner.setdefault(value, branch) != branch for of_type, value in values if of_type == kind):
            return False
    return True


def _types(schema: Schema) -> frozenset[str]:
    """Return the types that a schema admits."""
    if "const" in schema or isinstance(schema.get("enum"), list):
        listed = [schema["const"]] if "const" in schema else schema["enum"]
        return frozenset(kind for kind in _TYPES for value in listed if is_of(value, kind))
    given = schema.get("type", _TYPES)
    kinds = given if isinstance(given, list | tuple) else [given]
    return frozenset("number" if kind == "integer" else kind for kind in kinds if isinstance(kind, str))


def _enforced_types(schema: Schema) -> frozenset[str]:
    """Return the types of the answers: a schema without a type has those of its keywords."""
    implied = [kind for kind in ("string", "number", "array", "object") if OF_TYPE[kind] & schema.keys()]
    if "type" not in schema and "const" not in schema and "enum" not in schema and implied:
        return frozenset(implied)
    return _types(schema)
