"""The LoRA adapters that calls have loaded and unloaded. Engines report their last change of each; an ingress repeats
the newest ones for engines that lack them, because they were built later or had no ranks during the call."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from aerie.cluster.ingress.routing import EngineView
from aerie.cluster.transport.admin import AdminCall, AdminOutcome, LoadLora, UnloadLora
from aerie.workers.scheduling.adapters import AdapterChange

logger = logging.getLogger(__name__)

PERIOD_S = 1.0  # between searches for engines that lack a change
RETRY_S = 30.0  # until a change that an engine refused is repeated
_NEVER = AdapterChange(0, "")


class AdapterChanges:
    """The newest change of each adapter, by name, that any engine has reported."""

    def __init__(self) -> None:
        self._newest: dict[str, AdapterChange] = {}

    def update(self, view: EngineView) -> None:
        """Take an engine's report."""
        for name, change in view.adapter_changes.items():
            self._newest[name] = max(change, self._newest.get(name, _NEVER))

    def loaded(self, views: Iterable[EngineView]) -> dict[str, str]:
        """Return the folders of the adapters that requests may name, including those that engines will load again."""
        paths = {name: adapter.path for view in views for name, adapter in view.adapters.items()}
        paths |= {name: change.path for name, change in self._newest.items()}
        return {name: path for name, path in paths.items() if path}

    def stamped(self, call: LoadLora | UnloadLora) -> LoadLora | UnloadLora:
        """Return a call that is newer than all changes of its adapter, also if another machine's clock is ahead."""
        stamp = max(time.time_ns(), self._newest.get(call.name, _NEVER).stamp + 1)
        return msgspec.structs.replace(call, stamp=stamp)

    def lacking(self, views: Iterable[EngineView]) -> list[LoadLora | UnloadLora]:
        """Return calls for the changes that a ready engine lacks, in their order. Others ignore them."""
        ready = [view for view in views if view.state is not None and view.state.status == "ready"]
        calls: list[LoadLora | UnloadLora] = []
        for name, change in sorted(self._newest.items(), key=lambda item: item[1].stamp):
            behind = [view for view in ready if view.adapter_changes.get(name, _NEVER).stamp < change.stamp]
            if change.path and behind:
                calls.append(LoadLora(name, change.path, True, change.stamp))
            elif any(name in view.adapters for view in behind):
                calls.append(UnloadLora(name, change.stamp))
        return calls


class Administered(Protocol):
    """A part of `aerie.cluster.ingress.remote_engines.EngineCalls`."""

    async def administer(self, call: AdminCall) -> list[AdminOutcome]: ...


async def repeat_changes(lacking: Callable[[], list[LoadLora | UnloadLora]], engines: Administered) -> None:
    """Repeat changes for the engines that lack them, for ever. lacking: see `AdapterChanges.lacking`."""
    retry_s: dict[LoadLora | UnloadLora, float] = {}
    while True:
        await asyncio.sleep(PERIOD_S)
        retry_s = {call: due_s for call, due_s in retry_s.items() if due_s > time.monotonic()}
        for call in lacking():
            if call in retry_s:
                continue
            try:
                outcomes = await engines.administer(call)
            except Exception:
                logger.exception("adapter %s could not be sent to new engines", call.name)
                outcomes = []
            faults = [
                f"{outcome.engine_id}: {outcome.error or outcome.fault}"
                for outcome in outcomes
                if outcome.error or outcome.fault
            ]
            if faults or not outcomes:
                retry_s[call] = time.monotonic() + RETRY_S
                logger.warning("adapter %s is not on all engines: %s", call.name, "; ".join(faults))
            else:
                logger.info("adapter %s: new engines have the last change", call.name)
