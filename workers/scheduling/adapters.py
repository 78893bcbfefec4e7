"""The LoRA adapters that an engine has: their names, which of them are in the ranks' tables, and how many requests have
each. Used by `aerie.workers.scheduling.scheduler`. Pure.

Ranks read adapters beside steps, and are asked repeatedly whether they have; requests wait for an adapter that new
ranks are still reading. An adapter gets a number when it is loaded. A request keeps the adapter of its arrival, also if
another one is loaded under the same name, or it is unloaded; the ranks forget an adapter when no request has it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from aerie.workers.config import LoraConfig
from aerie.workers.scheduling.commands.command import (
    AdapterReads,
    CommandAnswer,
    InspectAdapters,
    LoadAdapter,
    UnloadAdapter,
    first_error,
)
from aerie.workers.scheduling.commands.command_queue import CommandQueue
from aerie.workers.scheduling.plan import pack_i32
from aerie.workers.scheduling.shapes.draft_fit import DraftFit

OnLoaded = Callable[[str], None]  # called with why an adapter could not be loaded, or ""
MAX_PASS_S = 1.0  # time for which requests with adapters may pass one whose adapter is not in the tables
_MAX_UNLOADED = 256  # unloaded adapters that are remembered, for engines that were not there when they were unloaded
_FIRST_POLL_S, _MAX_POLL_S = 0.005, 0.1  # a poll drains the steps in flight: once in 20 steps of 5 ms
_NONE = "this engine has no adapters; start it with enable_lora"


class AdapterChange(NamedTuple):
    """A load or unload by a call.

    stamp: nanoseconds since 1970; of two calls for a name, the larger one counts. 0: not known to other engines.
    path: the folder; "" if it was unloaded.
    """

    stamp: int
    path: str


@dataclass(eq=False)
class Adapter:
    """A loaded adapter.

    index: its index in the ranks' tables; -1: it is not there.
    num_requests: unfinished requests that have it.
    num_running: those with a slot.
    last_used: number of uses of all adapters at its last one.
    stamp: stamp of the call that loaded it.
    is_unloaded: whether new requests cannot have it.
    is_read: whether the ranks have read it, so that requests may run.
    draft: accepted drafts of its requests.
    """

    name: str
    number: int
    path: str
    index: int = -1
    num_requests: int = 0
    num_running: int = 0
    last_used: int = 0
    stamp: int = 0
    is_unloaded: bool = False
    is_read: bool = True
    draft: DraftFit = field(default_factory=DraftFit)


class Adapters:
    """See the module.

    clock: returns seconds.
    is_enabled: whether the engine can have adapters.
    changes: the last stamped change of each adapter, by name.
    due_s: when to ask the ranks again whether they have read what is loading.
    on_lost: called with each adapter that new ranks could not read again, and the reason; its requests must end.
    """

    def __init__(self, config: LoraConfig | None, commands: CommandQueue, clock: Callable[[], float]) -> None:
        self.is_enabled = config is not None
        self.on_lost: Callable[[Adapter, str], None] = lambda adapter, reason: None
        self._config = config or LoraConfig()
        self._commands = commands
        self._clock = clock
        self._reading: dict[int, tuple[Adapter, OnLoaded]] = {}  # by number
        self._poll_s, self.due_s = _FIRST_POLL_S, math.inf
        modules = self._config.modules.items()
        self._by_name = {name: Adapter(name, number, path) for number, (name, path) in enumerate(modules)}
        self._table: list[Adapter | None] = [None] * self._config.max_loras  # the adapter at each index
        self._placed: list[tuple[int, int]] = []  # (number, index) since the last plan
        self.changes: dict[str, AdapterChange] = {}
        self._retired: set[Adapter] = set()  # unloaded, but requests have them
        self._next_number, self._num_uses = len(self._by_name), 0

    @property
    def loaded(self) -> list[Adapter]:
        """The adapters that requests may name."""
        return list(self._by_name.values())

    def check(self, name: str) -> None:
        """Raise ValueError if a request cannot have the adapter `name`."""
        if name and name not in self._by_name:
            known = ", ".join(sorted(self._by_name)) or "none"
            raise ValueError(f"adapter={name}: " + (f"is not loaded; loaded: {known}" if self.is_enabled else _NONE))

    def find(self, name: str) -> Adapter | None:
        """Return the adapter of a new request, and count the request until `left`; None without an adapter."""
        if not name:
            return None
        adapter = self._by_name[name]
        adapter.num_requests += 1
        return adapter

    def left(self, adapter: Adapter | None) -> None:
        """Record that a request has ended that `find` counted."""
        if adapter is not None:
            adapter.num_requests -= 1
            self._forget_unused(adapter)

    def has_room(self, adapter: Adapter | None) -> bool:
        """Whether a request with this adapter may get a slot: the adapter is in the tables, or an index is unused."""
        if adapter is None or adapter.index >= 0:
            return True
        return adapter.is_read and any(other is None or not other.num_running for other in self._table)

    def enter(self, adapter: Adapter | None) -> int:
        """Record that a request gets a slot. Return its adapter's index from the next plan on; -1 without one. A
        new adapter in the tables replaces the one that is unused for longest."""
        if adapter is None:
            return -1
        if adapter.index < 0:
            unused = [
                index for index, occupant in enumerate(self._table) if occupant is None or not occupant.num_running
            ]
            index = min(unused, key=self._use_of)
            if (former := self._table[index]) is not None:
                former.index = -1
            self._table[index] = adapter
            adapter.index = index
            self._placed.append((adapter.number, index))
        self._num_uses += 1
        adapter.last_used = self._num_uses
        adapter.num_running += 1
        return adapter.index

    def _use_of(self, index: int) -> int:
        adapter = self._table[index]
        return -1 if adapter is None else adapter.last_used

    def leave(self, adapter: Adapter | None) -> None:
        """Record that a request has lost its slot."""
        if adapter is not None:
            adapter.num_running -= 1

    def take_changes(self) -> bytes:
        """Return `StepPlan.placed_adapters` since the last plan. The last adapter of an index counts."""
        changes = {index: number for number, index in self._placed}
        self._placed.clear()
        return pack_i32([value for index, number in changes.items() for value in (number, index)])

    @property
    def is_loading(self) -> bool:
        """Whether ranks read an adapter."""
        return bool(self._reading)

    def load(self, name: str, path: str, on_loaded: OnLoaded, replace: bool = False, stamp: int = 0) -> None:
        """Load an adapter beside running requests.

        stamp: see `AdapterChange`. If a call with this stamp or a later one has changed `name`, only on_loaded("") is
            called.
        replace: whether `name` may be loaded already; requests that come after the load have the new one.
        on_loaded: called with "" once the adapter is loaded. Called with an error if the load has failed; then nothing
            has changed.
        Raises ValueError if it cannot be loaded.
        """
        if not self.is_enabled:
            raise ValueError(_NONE)
        if self._is_late(name, stamp):
            on_loaded("")
            return
        if not name or not path:
            raise ValueError("lora_name, lora_path: must not be empty")
        loading = [adapter.name for adapter, _ in self._reading.values()]
        if name in loading:
            raise ValueError(f"adapter {name}: is being loaded; wait for it")
        if name in self._by_name and not replace:
            raise ValueError(f"adapter {name}: is loaded already; unload it, or set load_inplace")
        limit = self._config.max_cpu_loras
        if limit is not None and len({*self._by_name, *loading, name}) > limit:
            raise ValueError(f"adapter {name}: {limit} adapters are loaded, as many as max_cpu_loras; unload one")
        adapter = Adapter(name, self._next_number, path, stamp=stamp)
        self._next_number += 1

        def loaded(error: str) -> None:
            """Let requests have the adapter once all ranks have read it."""
            if error:
                self._commands.add(UnloadAdapter(adapter.number), lambda answers: None)
            else:
                self._retire(name)
                self._by_name[name] = adapter
                self._record(name, AdapterChange(stamp, path))
            on_loaded(error)

        self._read(adapter, loaded)

    def _read(self, adapter: Adapter, on_loaded: OnLoaded) -> None:
        """Have the ranks read an adapter."""
        adapter.is_read = False
        self._reading[adapter.number] = adapter, on_loaded
        self._poll_s = _FIRST_POLL_S
        self._commands.add(LoadAdapter(adapter.number, adapter.path), self._answered)

    def poll(self) -> None:
        """Queue a command that asks the ranks whether they have read what is loading, if it is due."""
        if self._clock() >= self.due_s:
            self.due_s = math.inf
            self._commands.add(InspectAdapters(tuple(self._reading)), self._answered)

    def _answered(self, answers: Sequence[CommandAnswer]) -> None:
        """End loads that all ranks have finished, and ask again later about the others."""
        if answers[0].rank < 0:
            return  # `fail_loads` ends all
        ended = [answer.result.ended if isinstance(answer.result, AdapterReads) else {} for answer in answers]
        for number in [number for number in self._reading if all(number in answer for answer in ended)]:
            adapter, on_loaded = self._reading.pop(number)
            adapter.is_read = True
            faults = zip(answers, ended, strict=True)
            on_loaded(
                first_error([CommandAnswer(0, 0, answer.rank, error=errors[number]) for answer, errors in faults])
            )
        self.due_s = self._clock() + self._poll_s if self._reading else math.inf
        self._poll_s = min(2 * self._poll_s, _MAX_POLL_S)

    def fail_loads(self, reason: str) -> None:
        """End all loads with an error, because the ranks are lost."""
        reading, self._reading, self.due_s = self._reading, {}, math.inf
        for _, on_loaded in reading.values():
            on_loaded(reason)

    def unload(self, name: str, stamp: int = 0) -> None:
        """Let no new request have the adapter. stamp: as in `load`. Raises ValueError if it is not loaded."""
        if self._is_late(name, stamp):
            return
        self._record(name, AdapterChange(stamp, ""))
        self.check(name or "")
        if not name:
            raise ValueError("lora_name: must not be empty")
        self._retire(name)

    def _is_late(self, name: str, stamp: int) -> bool:
        loading = [adapter.stamp for adapter, _ in self._reading.values() if adapter.name == name]
        return 0 < stamp <= max(self.changes.get(name, AdapterChange(0, "")).stamp, *loading, 0)

    def _record(self, name: str, change: AdapterChange) -> None:
        """Keep a change for new engines and ingresses; of unloaded adapters only the last ones."""
        if change.stamp:
            self.changes.pop(name, None)
            self.changes[name] = change
            unloaded = [
                number for number, last in self.changes.items() if not (last.path or number in self._config.modules)
            ]
            for number in unloaded[:-_MAX_UNLOADED]:
                del self.changes[number]

    def _retire(self, name: str) -> None:
        adapter = self._by_name.pop(name, None)
        if adapter is not None:
            adapter.is_unloaded = True
            self._retired.add(adapter)
            self._forget_unused(adapter)

    def _forget_unused(self, adapter: Adapter) -> None:
        """Let the ranks forget an adapter that is unloaded, if no request has it."""
        if adapter not in self._retired or adapter.num_requests:
            return
        self._retired.discard(adapter)
        self._reading.pop(adapter.number, None)
        if adapter.index >= 0:
            self._table[adapter.index] = None
        self._placed = [pair for pair in self._placed if pair[0] != adapter.number]
        self._commands.add(UnloadAdapter(adapter.number), lambda answers: None)

    def restore(self) -> None:
        """Queue the adapters for new ranks, which have `LoraConfig.modules` only, under the same numbers."""
        self._table = [None] * len(self._table)
        self._placed.clear()
        num_configured = len(self._config.modules)
        wanted = sorted({*self._by_name.values(), *self._retired}, key=lambda adapter: adapter.number)
        for adapter in wanted:
            adapter.index, adapter.num_running = -1, 0
            if adapter.number >= num_configured:
                self._read(adapter, self._restored(adapter))
        for number in set(range(num_configured)) - {adapter.number for adapter in wanted}:
            self._commands.add(UnloadAdapter(number), lambda answers: None)

    def _restored(self, adapter: Adapter) -> OnLoaded:
        """Return what to call when an adapter was loaded again, after the ranks were lost: on an error its requests
        end."""

        def loaded(error: str) -> None:
            if error and adapter.is_read:  # else the ranks were lost meanwhile, and further ones follow
                if self._by_name.get(adapter.name) is adapter:
                    self._retire(adapter.name)
                    self.changes.pop(adapter.name, None)
                self.on_lost(adapter, f"its adapter {adapter.name} cannot be loaded again: {error}")

        return loaded
