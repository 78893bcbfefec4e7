"""Finds what a JSON schema's `$ref` refers to, within the same schema. Read by
`aerie.workers.structured_output.json_schema`; plain values, no torch."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from aerie.workers.structured_output.schema_keywords import UnsupportedSchemaError

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
        place, part = "#", self._schema
        for step in unquote(target).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            place = f"{place}/{name}"
            if isinstance(part, list) and name.isascii() and name.isdigit() and int(name) < len(part):
                part = part[int(name)]
            elif isinstance(part, dict) and name in part:
                part = part[name]
            else:
                raise UnsupportedSchemaError(path, "$ref", f"{target!r}: nothing is there")
        return place, part

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
    pending = [(path, value)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict):
            yield path, value
            pending += [(f"{path}/{key}", each) for key, each in value.items() if key not in _VALUES]
        elif isinstance(value, list):
            pending += [(f"{path}/{i}", each) for i, each in enumerate(value)]
