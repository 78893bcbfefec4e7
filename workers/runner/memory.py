"""How the memory of a rank is divided: what is measured while it is built, and what of the rest KV gets.

Called by `workers.runner.build`. The order is: weights, then slots and their tables, then the largest steps that can
come, run on a pool of one page, then KV pages by what all that has left, then graphs. So no step needs memory that was
not set aside. On a CPU, where those steps would take many seconds, they are not run: KV gets a tenth of what is free,
and nine tenths stay for them. What is settled here is the same on all ranks: the least that any of them has room for.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from attention.capability import Capability
from workers.config import AUTO_SLOTS, GraphCapture, WorkerConfig
from workers.distributed.tp_group import TPGroup
from workers.engine_layout import EngineLayout, kv_bytes_asked, pages_asked
from workers.memory_use import HOST_LIMIT_BYTES, HOST_SHARE, DeviceMemoryError, MemoryUse
from workers.runner.device_memory import DeviceMemory
from workers.runner.graphs.warm_up import largest_steps, run
from workers.runner.worker import Worker
from workers.scheduling.plan import GraphCount

TYPICAL_TOKENS = 2048  # KV of a request, prompt and answer, by which `max_running: auto` counts
GRAPH_BYTES = 8 * 10**6  # of a captured round beside its tensors; 0.1 GB for 22 of them measured on an H200
GRAPH_SHARE = 0.05  # of the memory that is free at the start, for graphs that are captured as far as it goes
_FREED_WITHIN_S = 10.0


@dataclass(frozen=True)
class StepPeaks:
    """Bytes that steps without graphs take at most beside what is always there. rounds: those without prompts."""

    rounds: int = 0
    all_steps: int = 0


class RankMemory:
    """The memory of one rank while it is built. Its methods are called in the order in which they stand here."""

    def __init__(self, memory: DeviceMemory, worker: WorkerConfig, layout: EngineLayout, device: torch.device) -> None:
        """Before anything is allocated. Waits until a rank that this one takes the place of has left its memory."""
        self._memory = memory
        self._worker = worker
        self.device = device
        self._shares_host_memory = Capability.of(device).shares_host_memory
        if layout.memory is not None:
            wait_until_free(memory, layout.memory.of_rank)
        self._free_at_start = memory.free()
        self._used_at_start = memory.used()
        self._weights = self._activations = self._in_use = self._for_graphs = 0

    @property
    def runs_steps(self) -> bool:
        """Whether the largest steps are run, before KV is allocated and once all is there."""
        return Capability.of(self.device).captures_graphs

    @contextmanager
    def counting_weights(self) -> Iterator[None]:
        """While weights are loaded."""
        before = self.used()
        yield
        self._weights += self.used() - before

    def step_peaks(self, worker: Worker, layout: EngineLayout) -> StepPeaks:
        """What the largest steps of `worker` take, each run once. worker: without graphs."""
        peaks: dict[str, int] = {}
        for kind, plan in largest_steps(layout):
            peak = self._memory.peak_of(lambda plan=plan: run(worker, plan))  # type: ignore[misc]
            peaks[kind] = max(peaks.get(kind, 0), peak)
        return StepPeaks(peaks["rounds"], max(peaks.values()))

    def used(self) -> int:
        """What this rank has taken so far."""
        return max(0, self._memory.used() - self._used_at_start)

    def capture_limits(self, group: TPGroup) -> GraphCapture:
        """What rarer graphs may take: as configured, and of a small GPU little."""
        limits = self._worker.graph_capture
        most_gb = self._least(int(GRAPH_SHARE * self._free_at_start), group) / 1e9
        return replace(limits, limit_gb=min(limits.limit_gb, most_gb))

    def settle_slots(self, layout: EngineLayout, group: TPGroup) -> EngineLayout:
        """The layout with a number for `scheduler.max_running`. Call it once the target is loaded."""
        if layout.scheduler.max_running != "auto":
            return layout
        cache = self._worker.cache
        if cache.num_pages is not None:
            kv_bytes = cache.num_pages * layout.bytes_per_page
        elif cache.memory_gb != "auto":
            kv_bytes = int(cache.memory_gb * 1e9)
        else:
            kv_bytes = self._for_kv(int(self.capture_limits(group).limit_gb * 1e9))
        tokens = min(TYPICAL_TOKENS, layout.max_model_len)
        kv_bytes -= layout.with_snapshots(kv_bytes).saved_bytes
        each = layout.bytes_per_page * tokens // cache.page_size + layout.bytes_per_slot
        return layout.with_slots(self._least(slots_for(kv_bytes, each, self.device.type), group))

    def settle_pages(self, layout: EngineLayout, group: TPGroup, peaks: StepPeaks, num_graphs: int) -> EngineLayout:
        """The layout with its number of KV pages. num_graphs: of those that are captured whatever they take; they share
        their tensors' memory. Raises ValueError where what was asked for does not fit, or nothing is left."""
        cache, activations, graphs = self._worker.cache, peaks.all_steps, 0
        self._activations = activations
        if num_graphs:
            graphs = num_graphs * GRAPH_BYTES + peaks.rounds + int(self.capture_limits(group).limit_gb * 1e9)
        self._for_graphs = graphs
        kv_bytes = kv_bytes_asked(cache, layout.bytes_per_page, layout.slot_bytes)
        if kv_bytes is None:
            kv_bytes = self._for_kv(activations + graphs)
        layout = layout.with_snapshots(self._least(kv_bytes, group))
        saved = layout.saved_bytes
        fitting = self._least((self._room(activations + graphs) - saved) // layout.bytes_per_page - 1, group)
        asked = pages_asked(cache, layout.bytes_per_page, layout.slot_bytes + saved)
        if asked is None:
            pages = self._least((self._for_kv(activations + graphs) - saved) // layout.bytes_per_page - 1, group)
            if pages < 2:
                words = self._left_words(fitting, layout, activations, graphs)
                raise ValueError(f"cache.memory_gb=auto: of KV pages {words}")
            return layout.with_pages(pages)
        if asked > fitting:
            name = f"num_pages={cache.num_pages}" if cache.num_pages is not None else f"memory_gb={cache.memory_gb}"
            raise ValueError(
                f"cache.{name}: {asked} pages take {asked * layout.bytes_per_page / 1e9:.3f} GB, and "
                f"{self._left_words(fitting, layout, activations, graphs)}"
            )
        return layout.with_pages(asked)

    def kv_allocated(self) -> None:
        """All pages are there; what comes after them is graphs."""
        self._in_use = self.used()

    def use(self, layout: EngineLayout, graphs: GraphCount, group: TPGroup) -> MemoryUse:
        """Once the rank is ready; of several, that of this one, its `left` the least of all. Gives back what torch's
        allocator keeps for later."""
        free = self._memory.free()
        after_kv = max(0, self.used() - self._in_use)
        for_graphs = max(after_kv, self._for_graphs) if graphs.num_waiting else after_kv
        kv = (layout.num_pages + 1) * layout.bytes_per_page + layout.saved_bytes
        beside = self._in_use - self._weights - layout.slot_bytes - kv
        return MemoryUse(
            total=self._memory.total(),
            others=max(0, self._memory.total() - self._free_at_start),
            weights=self._weights,
            tables=layout.slot_bytes,
            workspaces=max(0, beside),
            activations=self._activations,
            graphs=for_graphs if graphs.num_captured else 0,
            kv=kv,
            left=self._least(free - self._activations - (for_graphs - after_kv), group),
        )

    def _room(self, reserved: int) -> int:
        """What KV may take at most, if `reserved` bytes are to come beside it."""
        room = int(self._worker.cache.memory_share * self._free_at_start) - self.used() - reserved
        return room // self._worker.tensor_parallel if self._shares_host_memory else room

    def _for_kv(self, reserved: int) -> int:
        """What KV takes of that if nobody says how much."""
        room = self._room(reserved)
        return min(int(HOST_SHARE * room), HOST_LIMIT_BYTES) if self._shares_host_memory else room

    def _least(self, value: int, group: TPGroup) -> int:
        if group.size == 1:
            return value
        mine = torch.tensor([value], dtype=torch.int64, device=self.device)
        return int(group.all_gather(mine).min())

    def _left_words(self, pages: int, layout: EngineLayout, activations: int, graphs: int) -> str:
        cache, room_gb = self._worker.cache, max(0, pages + 1) * layout.bytes_per_page / 1e9
        return (
            f"{max(0, pages)} ({room_gb:.3f} GB, with the tables of scheduler.max_running "
            f"{room_gb + layout.slot_bytes / 1e9:.3f}) fit into cache.memory_share={cache.memory_share:g} of the "
            f"{self._free_at_start / 1e9:.2f} GB that were free at the start, beside {self.used() / 1e9:.2f} in use, "
            f"{activations / 1e9:.2f} for the largest step and {graphs / 1e9:.2f} for graphs"
            + (f" and {layout.saved_bytes / 1e9:.2f} for cache.state_snapshots" if layout.saved_bytes else "")
            + "; give less, or raise "
            "parallel.tensor_parallel or cache.memory_share, or lower scheduler.max_running, scheduler.max_step_tokens "
            "or graph_capture.limit_gb"
        )


def slots_for(kv_bytes: int, request_bytes: int, device_type: str) -> int:
    """What `max_running: auto` means: the largest power of two of typical requests that kv_bytes hold, within
    `AUTO_SLOTS`. request_bytes: of such a request, its slot included."""
    least, most = AUTO_SLOTS[device_type]
    return min(most, max(least, 1 << max(0, (max(0, kv_bytes) // request_bytes).bit_length() - 1)))


def wait_until_free(
    memory: DeviceMemory,
    num_bytes: int,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Until so much is free, or ten seconds are over: the memory of a process that was killed is not free at once."""
    until_s = clock() + _FREED_WITHIN_S
    while memory.free() < num_bytes and clock() < until_s:
        sleep(0.05)


@contextmanager
def must_fit(what: str, remedy: str) -> Iterator[None]:
    """Turns a GPU's lack of memory into a DeviceMemoryError that says for what it was needed, and what to do."""
    try:
        yield
    except torch.OutOfMemoryError:
        free, total = torch.cuda.mem_get_info()
        raise DeviceMemoryError(
            f"no GPU memory for {what} ({free / 1e9:.1f} of {total / 1e9:.1f} GB are free): {remedy}"
        ) from None
