"""`Ingress`: the Serve deployment around the HTTP application, and what it takes from Serve and Ray.

Tokens arrive on one ZeroMQ socket per replica, bound here and named in every request; see
`cluster.ingress.remote_engines`.
"""

import asyncio
import dataclasses
import logging
import shutil
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import ray
import zmq
from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.config import AerieConfig
from cluster.http.app import build_app
from cluster.http.config import EdgeConfig
from cluster.http.requests.grammar_checker import ProcessChecker
from cluster.http.text.tokenizer import ChatTokenizer
from cluster.http.tracing import make_tracing
from cluster.ingress.remote_engines import RemoteEngines, TokenInbox
from cluster.logs import use_json_logs
from cluster.transport.channel import Context, bind_ingress
from cluster.transport.discovery import coordinator_prefix, find_coordinators
from cluster.transport.encoding import decode_tokens
from cluster.transport.keys import make_transport
from cluster.transport.listener import Listener
from cluster.transport.messages import EngineStats, FlushOutcome

logger = logging.getLogger(__name__)

T = TypeVar("T")

STATS_TIMEOUT_S = 1.0
FLUSH_TIMEOUT_S = 5.0


class ServeCalls:
    """`cluster.ingress.remote_engines.EngineCalls` over a Serve handle; what concerns all engines is asked of the
    coordinators themselves, found by name, because a handle reaches one replica."""

    def __init__(self, engine: DeploymentHandle, application: str) -> None:
        self._generate = engine.generate
        self._probe = engine.probe
        self._application = application
        self._coordinators: dict[str, Any] = {}

    def generate(self, payload: bytes) -> "asyncio.Future[bytes]":
        return _call(self._generate, payload)

    def probe(self, payload: bytes) -> "asyncio.Future[bytes]":
        return _call(self._probe, payload)

    async def stats(self) -> list[EngineStats]:
        return await self._ask_all(
            "stats", EngineStats, STATS_TIMEOUT_S, lambda name, fault: EngineStats(name, status="dead", detail=fault)
        )

    async def flush_cache(self) -> list[FlushOutcome]:
        return await self._ask_all(
            "flush_cache", FlushOutcome, FLUSH_TIMEOUT_S, lambda name, fault: FlushOutcome(name, fault=fault)
        )

    async def _ask_all(self, method: str, kind: type[T], limit_s: float, failed: Callable[[str, str], T]) -> list[T]:
        """Every coordinator's answer to `method`, or what `failed` makes of its engine's id and what was wrong."""
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                self._coordinators = await asyncio.to_thread(
                    find_coordinators, self._application, dict(self._coordinators)
                )
        except TimeoutError:
            logger.warning("Ray's name service did not answer in %g s; using the engines known before", STATS_TIMEOUT_S)

        async def ask(name: str, coordinator: Any) -> T:
            engine_id = name.removeprefix(coordinator_prefix(self._application))
            try:
                async with asyncio.timeout(limit_s):
                    raw: bytes = await getattr(coordinator, method).remote()
            except TimeoutError:
                return failed(engine_id, f"no answer in {limit_s:g} s")
            except ray.exceptions.RayError as error:
                return failed(engine_id, str(error).splitlines()[0])
            return msgspec.msgpack.decode(raw, type=kind)

        return list(await asyncio.gather(*(ask(*item) for item in list(self._coordinators.items()))))


def _call(method: Any, payload: bytes) -> "asyncio.Future[bytes]":
    response = method.remote(payload)
    call = asyncio.ensure_future(_result(response))
    call.add_done_callback(lambda done: response.cancel() if done.cancelled() else None)
    return call


async def _result(response: Awaitable[bytes]) -> bytes:
    return await response


@serve.ingress()
class Ingress:
    """One replica: the HTTP application over all engines of its Serve application."""

    async def __init__(  # type: ignore[misc]
        self, config: AerieConfig, engine: DeploymentHandle, one_node: bool
    ) -> None:
        if config.log_format == "json":
            use_json_logs("ingress")
        application = serve.get_replica_context().app_name
        self._transport = make_transport(one_node, application)
        self._context: Context = zmq.Context()
        socket, endpoint = bind_ingress(self._context, self._transport, f"ingress-{uuid.uuid4().hex[:8]}")
        inbox = TokenInbox()
        resume = config.engine.on_worker_loss == "resume"
        self._engines = RemoteEngines(ServeCalls(engine, application), inbox, endpoint, resume)
        self._listener = Listener(socket, lambda raw: inbox.deliver(decode_tokens(raw)))
        self._edge = edge_config(config)
        self._tokenizer = ChatTokenizer.from_folder(config.model.path)
        self._grammars = ProcessChecker(config.model.path, self._edge.grammar_timeout_s)
        self._tracing = make_tracing(config.tracing)

    def __serve_build_asgi_app__(self) -> FastAPI:
        # Serve adds the header X-Request-ID to every answer itself
        return build_app(self._edge, self._tokenizer, self._engines, False, self._grammars, self._tracing)

    async def __del__(self) -> None:
        # Serve awaits this when it stops the replica, after its requests have ended.
        if hasattr(self, "_listener"):
            self._listener.close()
            self._grammars.close()
            await asyncio.to_thread(self._tracing.close)
            self._context.destroy(linger=0)
            shutil.rmtree(self._transport.folder, ignore_errors=True)


def edge_config(config: AerieConfig) -> EdgeConfig:
    """The edge's configuration, with what it leaves to the engine's filled in."""
    return dataclasses.replace(
        config.ingress,
        served_model_name=config.served_model_name,
        max_model_len=config.ingress.max_model_len or config.model.max_model_len or 0,
    )
