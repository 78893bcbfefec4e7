"""Builds the OpenAPI document of `/openapi.json` from the routes' schemas, and the page `/docs` from the document."""

import html
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from pydantic.json_schema import models_json_schema

from aerie.cluster.http.endpoint import Endpoint
from aerie.cluster.http.schema.response import Struct

_REF = "#/components/schemas/{}"


def openapi_document(endpoints: Sequence[Endpoint], version: str, root_path: str = "") -> dict[str, Any]:
    """Return the OpenAPI 3.1 document. Schemas are named after their classes.

    root_path: the prefix that the routes are served below."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = re.sub(r"{(\w+):path}", r"{\1}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Aerie", "version": version},
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "paths": paths,
        "components": {"schemas": dict(sorted(_schemas(endpoints).items()))},
    }


def _operation(endpoint: Endpoint, path: str) -> dict[str, Any]:
    content = {"text/plain": {"schema": {"type": "string"}}}
    if endpoint.reply:
        content = {"application/json": _schema(*endpoint.reply)}
    if endpoint.event:
        # Each event's `data:` is one of these; the last is [DONE].
        content["text/event-stream"] = _schema(*endpoint.event)
    operation: dict[str, Any] = {
        "operationId": path.strip("/").translate(str.maketrans("/{}", "___")).strip("_"),
        "summary": (inspect.getdoc(endpoint.handler) or "").partition("\n")[0],
        "responses": {
            "200": {"description": "Success", "content": content},
            "default": {
                "description": "An error",
                "content": {"application/json": _schema(*endpoint.errors)},
            },
        },
    }
    if endpoint.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": _schema(endpoint.body)}}
    parameters = re.findall(r"{(\w+)}", path)
    if parameters:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in parameters
        ]
    return operation


def _schema(*kinds: type) -> dict[str, Any]:
    refs = [{"$ref": _REF.format(kind.__name__)} for kind in kinds]
    return {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}}


def _schemas(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Return the schema classes of all routes, and the classes of their fields."""
    replies = [kind for endpoint in endpoints for kind in (*endpoint.reply, *endpoint.event, *endpoint.errors)]
    _, of_replies = msgspec.json.schema_components(replies, ref_template=_REF.format("{name}"))
    structs = {struct.__name__: struct for struct in _subclasses(Struct)}
    for name, schema in of_replies.items():
        # msgspec requires only what a sender must give; a reply also has every other field that is never omitted
        fields = msgspec.structs.fields(structs[name])
        schema["required"] = [field.name for field in fields if field.default is not msgspec.UNSET]
    bodies = dict.fromkeys(endpoint.body for endpoint in endpoints if endpoint.body is not None)
    _, of_bodies = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF.format("{model}"))
    schemas: dict[str, Any] = of_bodies["$defs"]
    assert not schemas.keys() & of_replies.keys(), "two classes of one name"
    return schemas | of_replies


def _subclasses(kind: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    """Return direct and indirect subclasses."""
    return [each for child in kind.__subclasses__() for each in (child, *_subclasses(child))]


_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Aerie's HTTP API</title>
<style>body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}pre{overflow:auto;background:#f4f4f4;
padding:1em}code{font-size:90%}summary{cursor:pointer}h2{margin-top:2em}</style><h1>Aerie's HTTP API</h1>
<p>Version {version}. For programs: <a href="openapi.json">openapi.json</a>.</p>"""


def docs_page(document: Mapping[str, Any]) -> str:
    """Return HTML. document: OpenAPI."""
    parts = [_HEAD.replace("{version}", html.escape(document["info"]["version"])), "<h2>Routes</h2>"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h3><code>{method.upper()} {html.escape(path)}</code></h3>")
            parts.append(f"<p>{html.escape(operation['summary'])}</p><ul>")
            if "requestBody" in operation:
                parts.append(f"<li>takes {_links(operation['requestBody']['content'])}</li>")
            parts.append(f"<li>gives {_links(operation['responses']['200']['content'])}</li></ul>")
    parts.append("<h2>Schemas</h2>")
    for name, schema in document["components"]["schemas"].items():
        text = html.escape(json.dumps(schema, indent=2, ensure_ascii=False))
        parts.append(f'<details id="{name}"><summary><code>{name}</code></summary><pre>{text}</pre></details>')
    return "".join(parts)


def _links(content: Mapping[str, Any]) -> str:
    """Return links to the schema of each media type."""
    links = []
    for media, body in content.items():
        name = body["schema"].get("$ref", "").rpartition("/")[2]
        links.append(f'<a href="#{name}"><code>{name}</code></a>' if name else html.escape(media))
    return ", or as events ".join(links)
