"""`/docs`: the OpenAPI document as a page without external files."""

import html
import json
from collections.abc import Mapping
from typing import Any

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
