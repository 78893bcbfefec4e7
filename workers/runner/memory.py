"""Divides a rank's memory while it is built. Called by `workers.runner.build`.

The order: weights; slots and their tables; the largest possible steps, run on a pool of one page; KV pages in what is
left; graphs. So no step needs memory that was not reserved. On a CPU the largest steps would take many seconds and are
not run: KV gets a tenth of the free memory. All ranks use the same numbers: the minimum over the ranks.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from attention.capability import Capability
from workers.config import AUTO_SLOTS, GraphCapture, WorkerConfig
from workers.distributed.tp_group import TPGroup
from workers.engine_layout import TYPICAL_TOKENS, EngineLayout, PageCounts, kv_bytes_asked, pages_asked
from workers.memory_use import HOST_LIMIT_BYTES, HOST_SHARE, DeviceMemoryError, MemoryUse
from workers.runner.device_memory import DeviceMemory
from workers.runner.graphs.warm_up import largest_steps, run
from workers.runner.worker import Worker
from workers.scheduling.plan import GraphCount

GRAPH_BYTES = 8 * 10**6  # per captured round beside its tensors; measured: 0.1 GB for 22 on an H200
GRAPH_SHARE = 0.05  # share of the memory free at the start for graphs that are captured only if they fit
_FREED_WITHIN_S = 10.0


@dataclass(frozen=True)
class StepPeaks:
    """Peak bytes of steps without graphs, beside what is always allocated. rounds: of steps without prompts."""

    rounds: int = 0
    all_steps: int = 0


class RankMemory:
    """The memory of one rank while it is built. Its methods are called in the order of their definition."""

    def __init__(self, memory: DeviceMemory, worker: WorkerConfig, layout: EngineLayout, device: torch.device) -> None:
        """Called before anything is allocated. Waits until a previous rank has freed its memory."""
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
        """Whether the largest steps are run, before KV is allocated and after everything is."""
        return Capability.of(self.device).captures_graphs

    @contextmanager
    def counting_weights(self) -> Iterator[None]:
        """Count what is allocated while weights are loaded."""
        before = self.used()
        yield
        self._weights += self.used() - before

    def step_peaks(self, worker: Worker, layout: EngineLayout) -> StepPeaks:
        """Run each of the largest steps once, and return their peaks. worker: without graphs."""
        peaks: dict[str, int] = {}
        for kind, plan in largest_steps(layout):
            peak = self._memory.peak_of(lambda plan=plan: run(worker, plan))  # type: ignore[misc]
            peaks[kind] = max(peaks.get(kind, 0), peak)
        return StepPeaks(peaks["rounds"], max(peaks.values()))

    def used(self) -> int:
        """Bytes that this rank has allocated so far."""
        return max(0, self._memory.used() - self._used_at_start)

    def capture_limits(self, group: TPGroup) -> GraphCapture:
        """Return the limits of optional graphs: as configured, and little on a small GPU."""
        limits = self._worker.graph_capture
        most_gb = self._least(int(GRAPH_SHARE * self._free_at_start), group) / 1e9
        return replace(limits, limit_gb=min(limits.limit_gb, most_gb))

    def settle_slots(self, layout: EngineLayout, group: TPGroup) -> EngineLayout:
        """Return the layout with a number for `scheduler.max_running`. Call it after the target is loaded."""
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
        if layout.window is not None:
            each += layout.bytes_per_window_page * layout.window_pages(min(tokens, layout.window))
        return layout.with_slots(self._least(slots_for(kv_bytes, each, self.device.type), group))

    def settle_pages(self, layout: EngineLayout, group: TPGroup, peaks: StepPeaks, num_graphs: int) -> EngineLayout:
        """Return the layout with its number of KV pages.

        num_graphs: graphs that are always captured; they share the memory of their tensors.
        Raises ValueError if the requested pages do not fit, or if nothing is left.
        """
        cache, activations, graphs = self._worker.cache, peaks.all_steps, 0
        self._activations = activations
        if num_graphs:
            graphs = num_graphs * GRAPH_BYTES + peaks.rounds + int(self.capture_limits(group).limit_gb * 1e9)
        self._for_graphs = graphs
        kv_bytes = kv_bytes_asked(cache, layout.bytes_per_page, layout.slot_bytes, layout.bytes_per_snapshot)
        if kv_bytes is None:
            kv_bytes = self._for_kv(activations + graphs)
        layout = layout.with_snapshots(self._least(kv_bytes, group))
        saved = layout.saved_bytes
        room = self._least(self._room(activations + graphs) - saved, group)
        asked = pages_asked(layout, layout.slot_bytes + saved)
        if asked is None:
            counts = layout.pages_in(self._least(self._for_kv(activations + graphs) - saved, group))
            if counts.pages < 2 or (layout.window is not None and counts.windows < 2):
                words = self._left_words(room, layout, activations, graphs)
                raise ValueError(f"cache.memory_gb=auto: of KV pages {words}")
            return layout.with_pages(*counts)
        if layout.kv_bytes(asked) > room:
            name = f"num_pages={cache.num_pages}" if cache.num_pages is not None else f"memory_gb={cache.memory_gb}"
            used = layout.kv_bytes(asked) - layout.kv_bytes(PageCounts(0))
            raise ValueError(
                f"cache.{name}: {asked.pages} pages take {used / 1e9:.3f} GB, and "
                f"{self._left_words(room, layout, activations, graphs)}"
            )
        return layout.with_pages(*asked)

    def kv_allocated(self) -> None:
        """All pages are allocated; later allocations are graphs."""
        self._in_use = self.used()

    def use(self, layout: EngineLayout, graphs: GraphCount, group: TPGroup) -> MemoryUse:
        """Return this rank's memory use once it is ready, with the minimum of `left` over the ranks. Returns memory
        that torch's allocator caches."""
        free = self._memory.free()
        after_kv = max(0, self.used() - self._in_use)
        for_graphs = max(after_kv, self._for_graphs) if graphs.num_waiting else after_kv
        kv = layout.kv_bytes(layout.page_counts) + layout.saved_bytes
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
        """Maximum bytes for KV if `reserved` bytes are still needed beside it."""
        room = int(self._worker.cache.memory_share * self._free_at_start) - self.used() - reserved
        return room // self._worker.tensor_parallel if self._shares_host_memory else room

    def _for_kv(self, reserved: int) -> int:
        """Default bytes for KV."""
        room = self._room(reserved)
        return min(int(HOST_SHARE * room), HOST_LIMIT_BYTES) if self._shares_host_memory else room

    def _least(self, value: int, group: TPGroup) -> int:
        if group.size == 1:
            return value
        mine = torch.tensor([value], dtype=torch.int64, device=self.device)
        return int(group.all_gather(mine).min())

    def _left_words(self, room: int, layout: EngineLayout, activations: int, graphs: int) -> str:
        counts = layout.pages_in(room)
        cache, room_gb = self._worker.cache, max(0, layout.kv_bytes(counts)) / 1e9
        return (
            f"{max(0, counts.pages)} ({room_gb:.3f} GB, with the tables of scheduler.max_running "
            f"{room_gb + layout.slot_bytes / 1e9:.3f}) fit into cache.memory_share={cache.memory_share:g} of the "
            f"{self._free_at_start / 1e9:.2f} GB that were free at the start, beside {self.used() / 1e9:.2f} in use, "
            f"{activations / 1e9:.2f} for the largest step and {graphs / 1e9:.2f} for graphs"
            + (f" and {layout.saved_bytes / 1e9:.2f} for cache.state_snapshots" if layout.saved_bytes else "")
            + "; give less, or raise "
            "parallel.tensor_parallel or cache.memory_share, or lower scheduler.max_running, scheduler.max_step_tokens "
            "or graph_capture.limit_gb"
        )


def slots_for(kv_bytes: int, request_bytes: int, device_type: str) -> int:
    """Resolve `max_running: auto`: the largest power of two of typical requests that kv_bytes hold, within
    `AUTO_SLOTS`.

    request_bytes: of such a request, with its slot.
    """
    least, most = AUTO_SLOTS[device_type]
    return min(most, max(least, 1 << max(0, (max(0, kv_bytes) // request_bytes).bit_length() - 1)))


def wait_until_free(
    memory: DeviceMemory,
    num_bytes: int,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until so much memory is free, at most ten seconds: a killed process does not free its memory at once."""
    until_s = clock() + _FREED_WITHIN_S
    while memory.free() < num_bytes and clock() < until_s:
        sleep(0.05)


@contextmanager
def must_fit(what: str, remedy: str) -> Iterator[None]:
    """Turn a GPU's out-of-memory error into a DeviceMemoryError that says what needed it, and the remedy."""
    try:
        yield
    except torch.OutOfMemoryError:
        free, total = torch.cuda.mem_get_info()
        raise DeviceMemoryError(
            f"no GPU memory for {what} ({free / 1e9:.1f} of {total / 1e9:.1f} GB are free): {remedy}"
        ) from None
