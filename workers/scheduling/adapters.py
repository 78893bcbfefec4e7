"""The LoRA adapters that an engine has: their names, which of them are in the ranks' tables, and how many requests have
each. Used by `aerie.workers.scheduling.scheduler`. Pure.

An adapter gets a number when it is loaded. A request keeps the adapter of its arrival, also if another one is loaded
under the same name, or it is unloaded; the ranks forget an adapter when no request has it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aerie.workers.config import LoraConfig
from aerie.workers.scheduling.commands.command import (
    CommandAnswer,
    LoadAdapter,
    UnloadAdapter,
    first_error,
)
from aerie.workers.scheduling.commands.command_queue import CommandQueue, OnAnswered
from aerie.workers.scheduling.plan import pack_i32

MAX_PASS_S = 1.0  # time for which requests with adapters may pass one whose adapter has no place
_NONE = "this engine has no adapters; start it with enable_lora"


@dataclass(eq=False)
class Adapter:
    """A loaded adapter.

    place: in the ranks' tables; -1: none.
    num_requests: unfinished requests that have it. num_running: those with a slot.
    last_used: number of uses of all adapters at its last one.
    is_unloaded: whether new requests cannot have it.
    """

    name: str
    number: int
    path: str
    place: int = -1
    num_requests: int = 0
    num_running: int = 0
    last_used: int = 0
    is_unloaded: bool = False


class Adapters:
    """See the module.

    is_enabled: whether the engine can have adapters.
    on_lost: called with each adapter that new ranks could not read again, and the reason; its requests must end.
    """

    def __init__(self, config: LoraConfig | None, commands: CommandQueue) -> None:
        self.is_enabled = config is not None
        self.on_lost: Callable[[Adapter, str], None] = lambda adapter, reason: None
        self._config = config or LoraConfig()
        self._commands = commands
        modules = self._config.modules.items()
        self._by_name = {name: Adapter(name, number, path) for number, (name, path) in enumerate(modules)}
        self._places: list[Adapter | None] = [None] * self._config.max_loras
        self._changes: list[tuple[int, int]] = []  # (number, place) since the last plan
        self._retired: set[Adapter] = set()  # unloaded, but requests have them
        self._next_number, self._num_uses = len(self._by_name), 0
        self._loading: set[str] = set()

    @property
    def loaded(self) -> list[Adapter]:
        """The adapters that requests may name."""
        return list(self._by_name.values())

    def check(self, name: str) -> None:
        """Raise ValueError if a request cannot have the adapter `name`."""
        if name and name not in self._by_name:
            known = ", ".join(sorted(self._by_name)) or "none"
            raise ValueError(f"adapter={name}: " + (f"is not loaded; loaded: {known}" if self.is_enabled else _NONE))

    def of_request(self, name: str) -> Adapter | None:
        """Return the adapter of a request that has come; None without one. `left` must follow."""
        if not name:
            return None
        adapter = self._by_name[name]
        adapter.num_requests += 1
        return adapter

    def left(self, adapter: Adapter | None) -> None:
        """Record that a request has ended."""
        if adapter is not None:
            adapter.num_requests -= 1
            self._forget_unused(adapter)

    def has_room(self, adapter: Adapter | None) -> bool:
        """Whether a request with this adapter may get a slot: it is in the tables, or a place is unused."""
        return (
            adapter is None or adapter.place >= 0 or any(each is None or not each.num_running for each in self._places)
        )

    def enter(self, adapter: Adapter | None) -> int:
        """Record that a request gets a slot. Return the place of its adapter, from the next plan on; -1 without one.
        Takes the place of the adapter that is unused for longest."""
        if adapter is None:
            return -1
        if adapter.place < 0:
            unused = [place for place, each in enumerate(self._places) if each is None or not each.num_running]
            place = min(unused, key=self._use_of)
            if (former := self._places[place]) is not None:
                former.place = -1
            self._places[place] = adapter
            adapter.place = place
            self._changes.append((adapter.number, place))
        self._num_uses += 1
        adapter.last_used = self._num_uses
        adapter.num_running += 1
        return adapter.place

    def _use_of(self, place: int) -> int:
        adapter = self._places[place]
        return -1 if adapter is None else adapter.last_used

    def leave(self, adapter: Adapter | None) -> None:
        """Record that a request has lost its slot."""
        if adapter is not None:
            adapter.num_running -= 1

    def take_changes(self) -> bytes:
        """Return `StepPlan.placed_adapters` since the last plan. The last adapter in a place counts."""
        changes = {place: number for number, place in self._changes}
        self._changes.clear()
        return pack_i32([value for place, number in changes.items() for value in (number, place)])

    def load(self, name: str, path: str, on_answered: OnAnswered, replace: bool = False) -> None:
        """Load an adapter beside running requests.

        replace: whether `name` may be loaded already; requests that come after the load have the new one.
        Raises ValueError if it cannot be loaded; the command may still fail then, and nothing has changed.
        """
        if not self.is_enabled:
            raise ValueError(_NONE)
        if not name or not path:
            raise ValueError("lora_name, lora_path: must not be empty")
        if name in self._loading:
            raise ValueError(f"adapter {name}: is being loaded; wait for it")
        if name in self._by_name and not replace:
            raise ValueError(f"adapter {name}: is loaded already; unload it, or set load_inplace")
        limit = self._config.max_cpu_loras
        if limit is not None and len(self._by_name | dict.fromkeys((*self._loading, name))) > limit:
            raise ValueError(f"adapter {name}: {limit} adapters are loaded, as many as max_cpu_loras; unload one")
        adapter = Adapter(name, self._next_number, path)
        self._next_number += 1
        self._loading.add(name)

        def answered(answers: Sequence[CommandAnswer]) -> None:
            self._loading.discard(name)
            if not first_error(answers):
                self._retire(name)
                self._by_name[name] = adapter
            on_answered(answers)

        self._commands.add(LoadAdapter(adapter.number, path), answered)

    def unload(self, name: str) -> None:
        """Let no new request have the adapter. Raises ValueError if it is not loaded."""
        self.check(name or "")
        if not name:
            raise ValueError("lora_name: must not be empty")
        self._retire(name)

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
        if adapter.place >= 0:
            self._places[adapter.place] = None
        self._changes = [change for change in self._changes if change[0] != adapter.number]
        self._commands.add(UnloadAdapter(adapter.number), lambda answers: None)

    def restore(self) -> None:
        """Queue the adapters for new ranks, which have `LoraConfig.modules` only, under the same numbers."""
        self._places = [None] * len(self._places)
        self._changes.clear()
        given = len(self._config.modules)
        wanted = sorted({*self._by_name.values(), *self._retired}, key=lambda adapter: adapter.number)
        for adapter in wanted:
            adapter.place, adapter.num_running = -1, 0
            if adapter.number >= given:
                self._commands.add(LoadAdapter(adapter.number, adapter.path), self._restored(adapter))
        for number in set(range(given)) - {adapter.number for adapter in wanted}:
            self._commands.add(UnloadAdapter(number), lambda answers: None)

    def _restored(self, adapter: Adapter) -> OnAnswered:
        def answered(answers: Sequence[CommandAnswer]) -> None:
            if answers[0].rank >= 0 and (error := first_error(answers)):  # else further ranks follow
                if self._by_name.get(adapter.name) is adapter:
                    self._retire(adapter.name)
                self.on_lost(adapter, f"its adapter {adapter.name} cannot be loaded again: {error}")

        return answered
