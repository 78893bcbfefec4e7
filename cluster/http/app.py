"""The HTTP application of one ingress: OpenAI's routes and the operator's, over any `EngineClient`.

Bodies are read and checked here and not by FastAPI, whose own error form no OpenAI client understands.
"""

import asyncio
import importlib.metadata
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from cluster.http.admission import Admission
from cluster.http.config import EdgeConfig
from cluster.http.engine_client import EngineClient
from cluster.http.errors import (
    JSON_HEADERS,
    ApiError,
    body_too_large,
    invalid,
    model_not_found,
    unavailable,
    unfinished,
    unsupported,
)
from cluster.http.metrics import prometheus_text
from cluster.http.middleware import EdgeMiddleware
from cluster.http.prompts import chat_prompt, check_token_ids
from cluster.http.request import EdgeRequest, chat_request, check_model, text_request
from cluster.http.schema import ChatBody, DetokenizeBody, TextBody, TokenizeBody, parse_body
from cluster.http.serving import Edge, GenerationResponse
from cluster.http.tokenizer import ChatTokenizer
from cluster.transport.messages import EngineStats, FlushOutcome

logger = logging.getLogger(__name__)

STATS_TIMEOUT_S = 5.0
FLUSH_RETRY_S = 0.05
MAX_FLUSH_WAIT_S = 600.0
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def build_app(
    config: EdgeConfig, tokenizer: ChatTokenizer, engine: EngineClient, echo_request_id: bool = True
) -> FastAPI:
    """`app.state.admission` is its `Admission`; set `.draining` on it before shutting down. echo_request_id: send
    X-Request-Id with each reply; False under Ray Serve, whose server (2.60) adds the header itself: clients would read
    "id, id".

    Raises ValueError for a configuration without model name or length, which only its builder can know.
    """
    if not config.served_model_name or config.max_model_len < 1:
        raise ValueError(
            f"served_model_name={config.served_model_name!r}, max_model_len={config.max_model_len}: both "
            "must be filled in from the model before the application is built"
        )
    edge = Edge(config, tokenizer, engine, Admission(config.max_concurrent_requests, config.retry_after_s))
    app = FastAPI(title="Aerie", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.admission = edge.admission
    app.add_middleware(EdgeMiddleware, api_keys=config.api_keys, echo_request_id=echo_request_id)
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    _add_generation(app, edge)
    _add_tokenization(app, edge)
    _add_models(app, edge)
    _add_status(app, edge)
    _add_cache(app, edge)
    return app


def _add_generation(app: FastAPI, edge: Edge) -> None:
    config, tokenizer = edge.config, edge.tokenizer

    def response(http: Request, request: EdgeRequest, request_id: str | None) -> Response:
        if request_id is not None:
            http.state.request_id = request_id
        prefix = "chatcmpl" if request.chat else "cmpl"
        return GenerationResponse(edge, request, f"{prefix}-{uuid.uuid4().hex}", http.state.request_id)

    @app.post("/v1/chat/completions")
    async def chat_completions(http: Request) -> Response:
        edge.admission.check()
        body = parse_body(await _read(http, config), ChatBody)
        return response(http, await chat_request(body, config, tokenizer), body.request_id)

    @app.post("/v1/completions")
    async def completions(http: Request) -> Response:
        edge.admission.check()
        body = parse_body(await _read(http, config), TextBody)
        return response(http, await text_request(body, config, tokenizer), body.request_id)


def _add_tokenization(app: FastAPI, edge: Edge) -> None:
    config, tokenizer = edge.config, edge.tokenizer

    @app.post("/tokenize")
    async def tokenize(http: Request) -> Response:
        body = parse_body(await _read(http, config), TokenizeBody)
        check_model(body.model, config)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        if body.messages is not None:
            add_generation_prompt = body.add_generation_prompt is not False
            tokens = await chat_prompt(body.messages, tokenizer, add_generation_prompt, body.chat_template_kwargs)
        else:
            assert body.prompt is not None
            tokens = await tokenizer.encode(body.prompt, body.add_special_tokens is not False)
        document: dict[str, Any] = {"count": len(tokens), "max_model_len": config.max_model_len, "tokens": tokens}
        if body.return_token_strs:
            document["token_strs"] = [tokenizer.token_name(token) for token in tokens]
        return _json(document)

    @app.post("/detokenize")
    async def detokenize(http: Request) -> Response:
        body = parse_body(await _read(http, config), DetokenizeBody)
        check_model(body.model, config)
        return _json({"prompt": tokenizer.decode(check_token_ids("tokens", body.tokens, tokenizer))})


def _add_models(app: FastAPI, edge: Edge) -> None:
    name = edge.config.served_model_name
    card = {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "aerie",
        "root": name,
        "parent": None,
        "max_model_len": edge.config.max_model_len,
    }

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [card]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        if model != name:
            raise model_not_found(model, name)
        return _json(card)

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": _version()})


def _add_status(app: FastAPI, edge: Edge) -> None:
    @app.get("/health")
    async def health() -> Response:
        return _health(await _stats(edge.engine), edge.config)

    @app.get("/ready")
    async def ready() -> Response:
        edge.admission.check(0)
        return _health(await _stats(edge.engine), edge.config)

    @app.get("/metrics")
    async def metrics() -> Response:
        text = prometheus_text(await _stats(edge.engine), edge.config.served_model_name)
        return Response(text, headers={"content-type": METRICS_TYPE})


def _add_cache(app: FastAPI, edge: Edge) -> None:
    """SGLang's route and vLLM's, with the rule of both: a cache in use is left alone, and the answer says so. As with
    SGLang, `timeout` waits so many seconds for the requests to end."""

    @app.post("/flush_cache")
    @app.post("/reset_prefix_cache")
    async def flush_cache(http: Request) -> Response:
        for name, value in http.query_params.items():
            if name != "timeout" and value.lower() != "false":
                raise unsupported(name, "the prefix cache is emptied while nothing runs; wait with timeout=SECONDS")
        deadline_s = time.monotonic() + _wait_s(http.query_params.get("timeout", "0"))
        while True:
            outcomes = await edge.engine.flush_cache()
            error = _flush_error(outcomes, edge.config.retry_after_s)
            if error is None:
                return _json(
                    {
                        "success": True,
                        "engines": [{"engine_id": each.engine_id, "num_pages": each.num_pages} for each in outcomes],
                    }
                )
            if error.status != 409 or time.monotonic() >= deadline_s:
                raise error
            await asyncio.sleep(FLUSH_RETRY_S)


def _wait_s(timeout: str) -> float:
    try:
        wait_s = float(timeout)
    except ValueError:
        wait_s = -1.0
    if not 0.0 <= wait_s <= MAX_FLUSH_WAIT_S:  # NaN is not either
        raise invalid("timeout", f"timeout must be from 0 to {MAX_FLUSH_WAIT_S:g} seconds")
    return wait_s


def _flush_error(outcomes: Sequence[FlushOutcome], retry_after_s: float) -> ApiError | None:
    """Why not every engine's prefix cache is empty now."""
    if not outcomes:
        return unavailable("No engine is known yet", retry_after_s)
    faults = [f"{each.engine_id}: {each.fault}" for each in outcomes if each.fault]
    if faults:
        return unavailable("The prefix cache was not emptied: " + "; ".join(faults), retry_after_s)
    busy = [f"on {each.engine_id}, {each.unfinished}" for each in outcomes if each.unfinished]
    if busy:
        return unfinished("The prefix cache was not emptied: " + "; ".join(busy), retry_after_s)
    return None


def _health(engines: Sequence[EngineStats], config: EdgeConfig) -> Response:
    """200 if an engine can work, else 503 and why none can."""
    states = [
        {
            "engine_id": engine.engine_id,
            "status": engine.status,
            "detail": engine.detail,
            "num_running": engine.num_running,
            "num_waiting": engine.num_waiting,
            "last_step_age_s": engine.last_step_age_s,
        }
        for engine in engines
    ]
    if any(engine.status == "ready" for engine in engines):
        return _json({"status": "ok", "engines": states})
    reasons = [f"{e.engine_id} is {e.status}" + (f" ({e.detail})" if e.detail else "") for e in engines]
    error = unavailable("No engine is ready: " + ("; ".join(reasons) or "none is known yet"), config.retry_after_s)
    document = {"status": "unavailable", "engines": states} | msgspec.json.decode(error.body())
    return Response(msgspec.json.encode(document), 503, {**JSON_HEADERS, **error.headers})


async def _stats(engine: EngineClient) -> list[EngineStats]:
    """All engines' statistics; none if they cannot be had, which then is the answer to how the engines are."""
    try:
        async with asyncio.timeout(STATS_TIMEOUT_S):
            return await engine.stats()
    except Exception:
        logger.exception("the engines' statistics cannot be had")
        return []


async def _read(http: Request, config: EdgeConfig) -> bytes:
    """The body. Raises ApiError if it is too large, before all of it is read."""
    declared = http.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > config.max_body_bytes:
        raise body_too_large(config.max_body_bytes)
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > config.max_body_bytes:
            raise body_too_large(config.max_body_bytes)
    return bytes(body)


async def _answer_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _answer_http_error(http: Request, error: Exception) -> Response:
    """Unknown routes and wrong methods, which the router finds."""
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
    return answer.response()


def _json(document: Any) -> Response:
    return Response(msgspec.json.encode(document), headers=JSON_HEADERS)


def _version() -> str:
    try:
        return importlib.metadata.version("aerie")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed as a package)"
