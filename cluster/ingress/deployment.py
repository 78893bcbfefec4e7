"""`Ingress`, the Serve deployment of the HTTP application. It finds coordinators through Ray, calls methods of all of
them at once, and has a ZeroMQ connection to each (`engine_links`)."""

import asyncio
import contextlib
import dataclasses
import logging
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from typing import Any, TypeVar

import msgspec
import ray
import zmq
from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from aerie.cluster.http.app import build_app
from aerie.cluster.http.calls import Body, Calls, Reply
from aerie.cluster.http.config import EdgeConfig
from aerie.cluster.http.parsers.self_check import chat_lines, chosen_parser
from aerie.cluster.http.requests.grammar_checker import ProcessChecker
from aerie.cluster.http.requests.image_reader import image_reader
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.cluster.http.tracing import make_tracing
from aerie.cluster.ingress.adapter_changes import repeat_changes
from aerie.cluster.ingress.engine_links import EngineLinks
from aerie.cluster.ingress.remote_engines import RemoteEngines
from aerie.cluster.linux import raise_open_files
from aerie.cluster.plan import IngressPlan
from aerie.cluster.start_log import StartLog, use_logs
from aerie.cluster.transport.admin import AdminCall, AdminOutcome
from aerie.cluster.transport.channel import Context
from aerie.cluster.transport.discovery import application_keys, find_coordinators
from aerie.cluster.transport.messages import EngineStats, FlushOutcome
from aerie.cluster.transport.sockets import Transport

logger = logging.getLogger(__name__)

T = TypeVar("T")

STATS_TIMEOUT_S = 1.0  # maximum time to wait for engines' statistics
FLUSH_TIMEOUT_S = 5.0  # maximum time to wait for engines to flush their caches
ADMIN_TIMEOUT_S = 670.0  # longer than an engine takes: `aerie.cluster.coordinator.coordinator.ADMIN_TIMEOUT_S`


class Coordinators:
    """Implements `aerie.cluster.ingress.remote_engines.EngineCalls`; also finds the coordinators' inboxes."""

    def __init__(self, application: str) -> None:
        self._application = application
        self._coordinators: dict[str, Any] = {}

    async def endpoints(self, known: Collection[str]) -> dict[str, str]:
        """Return the inboxes (ZeroMQ endpoints) of all coordinators that answer, by engine id; "" for those in `known`,
        and for those without an inbox yet."""
        coordinators = await self._coordinator_endpoints()

        async def ask(engine_id: str, coordinator: Any) -> str | None:
            """Return a coordinator's inbox; None if it does not answer."""
            if engine_id in known:
                return ""
            try:
                async with asyncio.timeout(STATS_TIMEOUT_S):
                    endpoint: str = await coordinator.endpoint.remote()
                    return endpoint
            except (TimeoutError, ray.exceptions.RayError):
                return None

        asked = await asyncio.gather(*(ask(*item) for item in coordinators.items()))
        return {
            engine_id: endpoint for engine_id, endpoint in zip(coordinators, asked, strict=True) if endpoint is not None
        }

    async def stats(self) -> list[EngineStats]:
        return await self._ask_all(
            "stats", EngineStats, STATS_TIMEOUT_S, lambda name, fault: EngineStats(name, status="dead", detail=fault)
        )

    async def flush_cache(self) -> list[FlushOutcome]:
        return await self._ask_all(
            "flush_cache", FlushOutcome, FLUSH_TIMEOUT_S, lambda name, fault: FlushOutcome(name, fault=fault)
        )

    async def administer(self, call: AdminCall) -> list[AdminOutcome]:
        return await self._ask_all(
            "administer",
            AdminOutcome,
            ADMIN_TIMEOUT_S + STATS_TIMEOUT_S,
            lambda name, fault: AdminOutcome(name, fault=fault),
            msgspec.msgpack.encode(call),
        )

    async def _ask_all(
        self, method: str, kind: type[T], limit_s: float, failed: Callable[[str, str], T], *arguments: bytes
    ) -> list[T]:
        """Call `method` of every coordinator. failed: makes a result from an engine id and an error."""
        with contextlib.suppress(TimeoutError):
            await self._coordinator_endpoints()

        async def ask(engine_id: str, coordinator: Any) -> T:
            """Return a coordinator's answer, or `failed`'s result."""
            try:
                async with asyncio.timeout(limit_s):
                    raw: bytes = await getattr(coordinator, method).remote(*arguments)
            except TimeoutError:
                return failed(engine_id, f"no answer in {limit_s:g} s")
            except ray.exceptions.RayError as error:
                return failed(engine_id, str(error).splitlines()[0])
            return msgspec.msgpack.decode(raw, type=kind)

        return list(await asyncio.gather(*(ask(*item) for item in list(self._coordinators.items()))))

    async def _coordinator_endpoints(self) -> dict[str, Any]:
        """Return handles of living coordinators by engine id. Raises TimeoutError if Ray does not answer; those found
        before are kept."""
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                coordinators = await asyncio.to_thread(find_coordinators, self._application, dict(self._coordinators))
        except TimeoutError:
            logger.warning("Ray's name service did not answer in %g s; using the engines known before", STATS_TIMEOUT_S)
            raise
        self._coordinators = coordinators
        return coordinators


# Maximum wait for a first successful probe, because an ingress that replaces another receives requests at once.
PROBE_LIMIT_S = 5.0
STREAM_SHARE = 0.75  # share of open files for requests; HAProxy's idle connections, engines and libraries need the rest
_AWAITS_STREAMS = "_call_generator_async"  # function of Serve's replicas
READY_PERIOD_S = 1.0  # between checks whether an engine is ready


@serve.ingress()
class Ingress:
    """One replica: the HTTP application in front of all engines of its Serve application, and the same for calls by
    Serve's handles (`docs/serve-handles.md`): each method takes the body of its route, and optionally `request_id` and
    `tenant`, and returns or streams as `aerie.cluster.http.calls.Calls.call` does.

    engine: unused, because the ingress finds engines itself; it makes Serve deploy both together.
    """

    async def __init__(self, plan: IngressPlan, engine: DeploymentHandle) -> None:  # type: ignore[misc]
        log = StartLog("ingress")
        log.done("replica began")
        use_logs(plan.log_format, "ingress")
        application = serve.get_replica_context().app_name
        transport = Transport(keys=None if plan.one_node else application_keys(application))
        self._context: Context = zmq.Context()
        coordinators = Coordinators(application)
        self._links = EngineLinks(self._context, transport, coordinators.endpoints, plan.config.routing, plan.identity)
        self._engines = RemoteEngines(self._links, coordinators, plan.resumes, plan.start_timeout_s)
        self._repeats = asyncio.create_task(repeat_changes(self._links.lacking_adapters, coordinators))
        self._edge = edge_config(plan.config, raise_open_files())
        self._tokenizer = ChatTokenizer.from_folder(plan.model.path, template_file=self._edge.chat_template)
        for line in chat_lines(self._tokenizer, self._edge.output_parser):
            logger.info("chats: %s", line)
        parser = chosen_parser(self._tokenizer, self._edge.output_parser)
        self._edge = dataclasses.replace(self._edge, output_parser=parser)
        self._grammars = ProcessChecker(plan.model.path, self._edge.grammar_timeout_s, self._tokenizer.num_ids)
        self._images = image_reader(plan.model, self._edge)
        self._tracing = make_tracing(plan.tracing)
        self._grammar_start = asyncio.create_task(self._begin_grammars())
        await self._engines.wait_for_probe(PROBE_LIMIT_S)
        log.done("ready")

    def __serve_build_asgi_app__(self) -> FastAPI:
        # Serve itself adds the header X-Request-ID to every response
        app = build_app(self._edge, self._tokenizer, self._engines, False, self._grammars, self._tracing, self._images)
        self._calls = Calls(app)
        return app

    async def chat(self, body: Body, **options: str) -> Reply | AsyncGenerator[Reply, None]:
        """/v1/chat/completions."""
        return await self._answer("/v1/chat/completions", body, options)

    async def completions(self, body: Body, **options: str) -> Reply | AsyncGenerator[Reply, None]:
        """/v1/completions."""
        return await self._answer("/v1/completions", body, options)

    async def responses(self, body: Body, **options: str) -> Reply | AsyncGenerator[Reply, None]:
        """/v1/responses."""
        return await self._answer("/v1/responses", body, options)

    async def messages(self, body: Body, **options: str) -> Reply | AsyncGenerator[Reply, None]:
        """/v1/messages."""
        return await self._answer("/v1/messages", body, options)

    async def generate(self, body: Body, **options: str) -> Reply | AsyncGenerator[Reply, None]:
        """/generate."""
        return await self._answer("/generate", body, options)

    async def tokens(self, body: Body, **options: str) -> Reply | AsyncGenerator[Reply, None]:
        """/inference/v1/generate."""
        return await self._answer("/inference/v1/generate", body, options)

    async def administer(self, route: str, body: Body | None = None, **options: str) -> Reply:
        """A route of `docs/weight-updates.md` or `docs/lora.md` without its slash, such as "pause?mode=keep". Raises
        ValueError for other routes."""
        return await self._calls.administer(f"/{route}", body or {}, **options)

    async def tokenize(self, body: Body, **options: str) -> Reply | AsyncGenerator[Reply, None]:
        """/tokenize."""
        return await self._calls.call("/tokenize", body, **options)

    async def detokenize(self, body: Body, **options: str) -> Reply | AsyncGenerator[Reply, None]:
        """/detokenize."""
        return await self._calls.call("/detokenize", body, **options)

    def _answer(
        self, route: str, body: Body, options: Mapping[str, str]
    ) -> Awaitable[Reply | AsyncGenerator[Reply, None]]:
        """Call a route that may stream, on behalf of the method that calls this one."""
        # Ray 2.60 tells a method nothing of `handle.options(stream=True)`, but awaits it in another function. With a
        # Ray that names it otherwise, a stream needs `stream` in its body too.
        awaiting = sys._getframe(1).f_back
        streams = awaiting is not None and awaiting.f_code.co_name == _AWAITS_STREAMS
        return (self._calls.stream if streams else self._calls.call)(route, body, **options)

    async def _begin_grammars(self) -> None:
        """Start the grammar process once an engine is ready. Until then the engine needs the cores of this machine."""
        while not any(engine.status == "ready" for engine in (await self._engines.health())[0]):
            await asyncio.sleep(READY_PERIOD_S)
        await self._grammars.begin()
        await self._images.begin()

    async def __del__(self) -> None:
        # Serve awaits this when it stops the replica, after its last request.
        if hasattr(self, "_begun"):
            self._grammar_start.cancel()
            self._repeats.cancel()
            self._links.close()
            self._grammars.close()
            await asyncio.to_thread(self._tracing.close)
            self._context.destroy(linger=0)


def edge_config(config: EdgeConfig, open_files: int) -> EdgeConfig:
    """Return `config` with the limit of concurrent requests lowered to what this process can serve. open_files: its
    limit of open files; each request's connection needs one."""
    wanted = config.max_concurrent_requests or open_files
    limit = max(config.max_choices, min(wanted, int(open_files * STREAM_SHARE)))
    return dataclasses.replace(config, max_concurrent_requests=limit)
