"""The HTTP application of one ingress: all routes, over any `EngineClient`.

`aerie.cluster.http.endpoint` reads and checks bodies instead of FastAPI, whose error format OpenAI clients do not
understand.
"""

import dataclasses
import functools
import logging
import math

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from aerie.attention import distribution
from aerie.cluster.http.admission import Admission
from aerie.cluster.http.config import EdgeConfig
from aerie.cluster.http.endpoint import answering
from aerie.cluster.http.engine_client import EngineClient
from aerie.cluster.http.errors import JSON_HEADERS, ApiError
from aerie.cluster.http.limits import HEADERS
from aerie.cluster.http.metrics import KeyUsage, set_reason
from aerie.cluster.http.middleware import EdgeMiddleware
from aerie.cluster.http.openapi import docs_page, openapi_document
from aerie.cluster.http.origins import Origins
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
    status,
    tokenization,
    weights,
)
from aerie.cluster.http.serving import Edge
from aerie.cluster.http.tenants import Tenants
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.cluster.http.tracing import Tracing

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
ROUTES = (*_GENERATING, tokenization, models, status, prefix_cache, weights, adapters)


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
        found = detect_family(tokenizer.template_source, tokenizer.response_template is not None)
        config = dataclasses.replace(config, output_parser=found)
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
    endpoints = [endpoint for group in ROUTES for endpoint in group.endpoints(edge)]
    edge.counts.count_separately([endpoint.path for endpoint in endpoints])
    for endpoint in endpoints:
        answer = answering(endpoint, edge.admission, config)
        # Starlette's route: FastAPI's would look for parameters and dependencies in every request.
        app.router.routes.append(Route(endpoint.path, answer, methods=[endpoint.method]))

    app.router.routes.extend(page_routes())

    @functools.cache
    def document(root_path: str) -> bytes:
        return msgspec.json.encode(openapi_document(endpoints, distribution.version(), root_path))

    async def openapi(http: Request) -> Response:
        return Response(document(http.scope.get("root_path", "")), headers=JSON_HEADERS)

    async def docs(http: Request) -> Response:
        return HTMLResponse(docs_page(msgspec.json.decode(document(""))))

    app.router.routes += [Route("/openapi.json", openapi), Route("/docs", docs)]
    return app


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
