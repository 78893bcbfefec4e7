"""Finds coordinators through Ray, and calls methods of all of them at once."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import msgspec
import ray

from aerie.cluster.transport.admin import AdminCall, AdminOutcome
from aerie.cluster.transport.discovery import find_coordinators
from aerie.cluster.transport.messages import EngineStats, FlushOutcome

logger = logging.getLogger(__name__)

T = TypeVar("T")

STATS_TIMEOUT_S = 1.0
FLUSH_TIMEOUT_S = 5.0
ADMIN_TIMEOUT_S = 670.0  # longer than an engine takes: `aerie.cluster.coordinator.transfer_calls.ADMIN_TIMEOUT_S`


class Coordinators:
    """Implements `aerie.cluster.ingress.remote_engines.EngineCalls`; also finds the coordinators' inboxes."""

    def __init__(self, application: str) -> None:
        self._application = application
        self._coordinators: dict[str, Any] = {}

    async def endpoints(self, known: Collection[str]) -> dict[str, str]:
        """Return the inboxes (ZeroMQ endpoints) of all coordinators that answer, by engine id; "" for those in `known`,
        and for those without an inbox yet."""
        coordinators = await self._found()

        async def ask(engine_id: str, coordinator: Any) -> str | None:
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
            await self._found()

        async def ask(engine_id: str, coordinator: Any) -> T:
            try:
                async with asyncio.timeout(limit_s):
                    raw: bytes = await getattr(coordinator, method).remote(*arguments)
            except TimeoutError:
                return failed(engine_id, f"no answer in {limit_s:g} s")
            except ray.exceptions.RayError as error:
                return failed(engine_id, str(error).splitlines()[0])
            return msgspec.msgpack.decode(raw, type=kind)

        return list(await asyncio.gather(*(ask(*item) for item in list(self._coordinators.items()))))

    async def _found(self) -> dict[str, Any]:
        """Return handles of living coordinators by engine id. Raises TimeoutError if Ray does not answer; those found
        before are kept."""
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                found = await asyncio.to_thread(find_coordinators, self._application, dict(self._coordinators))
        except TimeoutError:
            logger.warning("Ray's name service did not answer in %g s; using the engines known before", STATS_TIMEOUT_S)
            raise
        self._coordinators = found
        return found
