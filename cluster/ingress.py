"""`Ingress`: the Serve deployment around the HTTP application, and what it takes from Serve and Ray.

Tokens arrive on one ZeroMQ socket per replica, bound here and named in every request; see `cluster.remote_engines`.
"""

import asyncio
import dataclasses
import logging
import shutil
import uuid
from collections.abc import Awaitable
from typing import Any, cast

import msgspec
import ray
import zmq.asyncio
from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.actors import NAMESPACE, coordinator_prefix
from cluster.channel import bind_ingress, decode_tokens
from cluster.config import AerieConfig
from cluster.edge_config import EdgeConfig
from cluster.http_app import build_app
from cluster.messages import EngineStats
from cluster.plan_report import model_name
from cluster.remote_engines import RemoteEngines, TokenInbox
from cluster.tokenizer import ChatTokenizer
from cluster.wiring import make_transport

logger = logging.getLogger(__name__)

STATS_TIMEOUT_S = 1.0


class ServeCalls:
    """`cluster.remote_engines.EngineCalls` over a Serve handle; statistics come from the coordinators themselves, found
    by name, because a handle reaches one replica and /health and /metrics need all."""

    def __init__(self, engine: DeploymentHandle, application: str) -> None:
        self._generate = engine.generate
        self._prefix = coordinator_prefix(application)
        self._coordinators: dict[str, Any] = {}

    def generate(self, payload: bytes) -> "asyncio.Future[bytes]":
        response = self._generate.remote(payload)
        call = asyncio.ensure_future(_result(response))
        call.add_done_callback(lambda done: response.cancel() if done.cancelled() else None)
        return call

    async def stats(self) -> list[EngineStats]:
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                self._coordinators = await asyncio.to_thread(self._find, dict(self._coordinators))
        except TimeoutError:
            logger.warning("Ray's name service did not answer in %g s; using the engines known before", STATS_TIMEOUT_S)
        return list(await asyncio.gather(*(self._ask(name) for name in list(self._coordinators))))

    def _find(self, known: dict[str, Any]) -> dict[str, Any]:
        names = [
            actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)
            if actor["namespace"] == NAMESPACE and actor["name"].startswith(self._prefix)
        ]
        found = {}
        for name in names:
            try:
                found[name] = known.get(name) or ray.get_actor(name, namespace=NAMESPACE)
            except ValueError:
                continue  # it died between the two calls
        return found

    async def _ask(self, name: str) -> EngineStats:
        engine_id = name.removeprefix(self._prefix)
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                raw = await self._coordinators[name].stats.remote()
        except TimeoutError:
            return EngineStats(engine_id=engine_id, status="dead", detail=f"no answer in {STATS_TIMEOUT_S:g} s")
        except ray.exceptions.RayActorError as error:
            return EngineStats(engine_id=engine_id, status="dead", detail=str(error).splitlines()[0])
        return msgspec.msgpack.decode(cast(bytes, raw), type=EngineStats)


async def _result(response: Awaitable[bytes]) -> bytes:
    return await response


@serve.ingress()
class Ingress:
    """One replica: the HTTP application over all engines of its Serve application."""

    async def __init__(  # type: ignore[misc]
        self, config: AerieConfig, engine: DeploymentHandle, one_node: bool
    ) -> None:
        application = serve.get_replica_context().app_name
        self._transport = make_transport(one_node, application)
        self._context = zmq.asyncio.Context()
        self._socket, endpoint = bind_ingress(
            self._context, self._transport, f"ingress-{uuid.uuid4().hex[:8]}"  # type: ignore[arg-type]
        )
        inbox = TokenInbox()
        resume = config.engine.on_worker_loss == "resume"
        self._engines = RemoteEngines(ServeCalls(engine, application), inbox, endpoint, resume)
        self._reading = asyncio.create_task(self._read(inbox))
        self._edge = edge_config(config)
        self._tokenizer = ChatTokenizer.from_folder(config.model.path)

    def __serve_build_asgi_app__(self) -> FastAPI:
        # Serve adds the header X-Request-ID to every answer itself
        return build_app(self._edge, self._tokenizer, self._engines, echo_request_id=False)


    async def _read(self, inbox: TokenInbox) -> None:
        while True:
            inbox.deliver(decode_tokens(await self._socket.recv()))  # type: ignore[misc]

    async def __del__(self) -> None:
        # Serve awaits this when it stops the replica, after its requests have ended.
        if hasattr(self, "_reading"):
            self._reading.cancel()
            self._context.destroy(linger=0)
            shutil.rmtree(self._transport.folder, ignore_errors=True)


def edge_config(config: AerieConfig) -> EdgeConfig:
    """The edge's configuration, with what it leaves to the engine's filled in."""
    return dataclasses.replace(
        config.ingress,
        served_model_name=model_name(config),
        max_model_len=config.ingress.max_model_len or config.model.max_model_len or 0,
    )
