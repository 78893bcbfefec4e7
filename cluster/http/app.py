"""The HTTP application of one ingress: all routes, over any `EngineClient`, and the OpenAPI document made of their
schemas (`/openapi.json`, `/docs`). `aerie.cluster.http.endpoint` reads and checks bodies instead of FastAPI, whose
error format OpenAI clients do not understand."""

import dataclasses
import functools
import html
import inspect
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from aerie.attention import distribution
from aerie.cluster.http.admission import Admission
from aerie.cluster.http.config import EdgeConfig
from aerie.cluster.http.endpoint import Endpoint, answering
from aerie.cluster.http.engine_client import EngineClient
from aerie.cluster.http.errors import JSON_HEADERS, ApiError
from aerie.cluster.http.metrics import KeyUsage, set_reason
from aerie.cluster.http.middleware import EdgeMiddleware, Origins
from aerie.cluster.http.page.files import page_routes
from aerie.cluster.http.parsers.families import detect_family
from aerie.cluster.http.requests.grammar_checker import GrammarChecker
from aerie.cluster.http.requests.image_reader import ImageReader
from aerie.cluster.http.requests.parameters import with_sampling_defaults
from aerie.cluster.http.routes import (
    adapters,
    generation,
    inference,
    messages,
    models,
    native,
    prefix_cache,
    responses,
    skyrl,
    status,
    tokenization,
    weights,
)
from aerie.cluster.http.schema.response import Struct
from aerie.cluster.http.serving import Edge
from aerie.cluster.http.tenants import HEADERS, Tenants
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.cluster.http.tracing import Tracing

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
    """Return the OpenAPI operation of one route."""
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
    _, reply_schemas = msgspec.json.schema_components(replies, ref_template=_REF.format("{name}"))
    structs = {struct.__name__: struct for struct in _subclasses(Struct)}
    for name, schema in reply_schemas.items():
        # msgspec requires only what a sender must give; a reply also has every other field that is never omitted
        fields = msgspec.structs.fields(structs[name])
        schema["required"] = [field.name for field in fields if field.default is not msgspec.UNSET]
    bodies = dict.fromkeys(endpoint.body for endpoint in endpoints if endpoint.body is not None)
    _, body_schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF.format("{model}"))
    schemas: dict[str, Any] = body_schemas["$defs"]
    assert not schemas.keys() & reply_schemas.keys(), "two classes of one name"
    return schemas | reply_schemas


def _subclasses(kind: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    """Return direct and indirect subclasses."""
    return [subclass for child in kind.__subclasses__() for subclass in (child, *_subclasses(child))]


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


logger = logging.getLogger(__name__)

EXPOSED_HEADERS = (
    "x-request-id",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    "x-aerie-ignored",
    *HEADERS,
)  # for scripts of other origins
_GENERATING = (generation, responses, messages, native, inference)
_ADMINISTRATIVE = (prefix_cache, weights, adapters)
ROUTES = (*_GENERATING, tokenization, models, status, *_ADMINISTRATIVE, skyrl)


def build_app(
    config: EdgeConfig,
    tokenizer: ChatTokenizer,
    engine: EngineClient,
    echo_request_id: bool = True,
    grammars: GrammarChecker = GrammarChecker(),  # noqa: B008 - has no state
    tracing: Tracing = Tracing(),  # noqa: B008 - has no state
    images: ImageReader = ImageReader(),  # noqa: B008 - has no state
) -> FastAPI:
    """Build the application. `app.state.admission` is its `Admission`; set `.draining` before shutting down.
    `app.state.administration` has the method of each route that administers engines, by path.

    echo_request_id: send X-Request-Id with each reply; False under Ray Serve (2.60), which adds the header itself:
        clients would read "id, id".
    grammars: tries grammars before requests run.
    tracing: receives a span per generation.
    images: prepares the images of conversations, or refuses them.
    Raises ValueError for a configuration without model name or length.
    """
    if not config.served_model_name or config.max_model_len < 1:
        raise ValueError(
            f"served_model_name={config.served_model_name!r}, max_model_len={config.max_model_len}: both "
            "must be filled in from the model before the application is built"
        )
    if config.output_parser == "auto":
        family = detect_family(tokenizer.template_source, tokenizer.response_template is not None)
        config = dataclasses.replace(config, output_parser=family)
    config = with_sampling_defaults(config, tokenizer.sampling_defaults)
    admission = Admission(config.max_concurrent_requests or math.inf, config.max_pending_bytes, config.retry_after_s)
    edge = Edge(config, tokenizer, engine, admission, grammars, tracing=tracing, images=images)
    app = FastAPI(title="Aerie", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.admission = edge.admission
    origins = Origins(config.allowed_hosts, config.allowed_origins)
    tenants = Tenants(config)
    edge.counts.by_key = {tenant.name: KeyUsage() for tenant in tenants.named}
    app.add_middleware(EdgeMiddleware, tenants, origins, echo_request_id, edge.counts)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    administration = [endpoint for group in _ADMINISTRATIVE for endpoint in group.endpoints(edge)]
    app.state.administration = {endpoint.path: endpoint.method for endpoint in administration}
    endpoints = [endpoint for group in ROUTES for endpoint in group.endpoints(edge)]
    edge.counts.count_separately([endpoint.path for endpoint in endpoints])
    for endpoint in endpoints:
        answer = answering(endpoint, edge.admission, config)
        # Starlette's route: FastAPI's would look for parameters and dependencies in every request.
        app.router.routes.append(Route(endpoint.path, answer, methods=[endpoint.method]))
    app.router.routes += [*page_routes(), *_document_routes(endpoints)]
    return app


def _document_routes(endpoints: Sequence[Endpoint]) -> list[Route]:
    """Return the routes of the description of `endpoints`, which is made at its first use."""

    @functools.cache
    def document(root_path: str) -> bytes:
        return msgspec.json.encode(openapi_document(endpoints, distribution.version(), root_path))

    async def openapi(http: Request) -> Response:
        return Response(document(http.scope.get("root_path", "")), headers=JSON_HEADERS)

    async def docs(http: Request) -> Response:
        return HTMLResponse(docs_page(msgspec.json.decode(document(""))))

    return [Route("/openapi.json", openapi), Route("/docs", docs)]


async def _answer_api_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    set_reason(http.scope, error.code)
    return error.response()


async def _answer_http_error(http: Request, error: Exception) -> Response:
    """Answer unknown routes and wrong methods."""
    assert isinstance(error, HTTPException)
    where = f"{http.method} {http.url.path[:200]}"
    if error.status_code == 404:
        answer = ApiError(404, f"Unknown route: {where}", code="not_found")
    elif error.status_code == 405:
        allowed = dict(error.headers or {})
        message = f"Wrong method: {where}; allowed: {allowed.get('Allow', 'another')}"
        answer = ApiError(405, message, code="method_not_allowed", headers=allowed)
    else:
        answer = ApiError(error.status_code, str(error.detail))
    set_reason(http.scope, answer.code)
    return answer.response()
