"""Measures a rank's memory and divides it while the rank is built. Used by `aerie.workers.runner.build`.

Memory is allocated in this order: weights, tables of slots, KV pages, graphs. Before KV pages are allocated, the
largest possible steps run on a pool of one page, and their peak is reserved; KV pages get the rest. On a CPU the
largest steps do not run, because they would take many seconds, and KV gets a tenth of the free memory, which control
groups may limit. All ranks use the minimum over the ranks.
"""

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from aerie.kernels.capability import Capability
from aerie.workers.config import AUTO_SLOTS, GraphCapture, WorkerConfig
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.engine_layout import TYPICAL_TOKENS, EngineLayout, PageCounts, kv_bytes_asked, pages_asked
from aerie.workers.memory_use import HOST_LIMIT_BYTES, HOST_SHARE, DeviceMemoryError, MemoryUse
from aerie.workers.prompt_inputs import ImageSizes
from aerie.workers.runner.graphs.warm_up import largest_steps, run
from aerie.workers.runner.worker import Worker
from aerie.workers.scheduling.plan import GraphCount

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class DeviceMemory(Protocol):
    """The memory of a rank's device, in bytes."""

    def total(self) -> int:
        """Memory of the device; on a CPU at most the limits of the process's control groups."""

    def free(self) -> int:
        """Memory that can be allocated now."""

    def used(self) -> int:
        """Memory in use: on a GPU by all processes, on a CPU by this one."""

    def peak_of(self, run: Callable[[], None]) -> int:
        """Run `run`, and return its peak memory beyond what was in use before. On a GPU, all of it is freed
        afterwards."""


def device_memory(device: torch.device) -> DeviceMemory:
    return HostMemory() if Capability.of(device).shares_host_memory else CudaMemory(device)


class CudaMemory:
    """Memory of a GPU, shared with other processes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        self._release()
        return torch.cuda.mem_get_info(self._device)[0]

    def used(self) -> int:
        free = self.free()
        return self.total() - free

    def peak_of(self, run: Callable[[], None]) -> int:
        """Measures the memory that torch's allocator reserves, which includes rounding and fragmentation."""
        self._release()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)
        run()
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_reserved(self._device)
        self._release()
        return max(0, peak - before)

    def _release(self) -> None:
        """Free the memory that torch's allocator caches. Waits for the device."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()


class HostMemory:
    """Memory of a CPU. proc, control_groups: where Linux mounts these file systems; other folders in tests."""

    def __init__(self, proc: Path = Path("/proc"), control_groups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._control_groups = control_groups

    def total(self) -> int:
        return min([self._machine("MemTotal"), *(limit for limit, _ in self._limits())])

    def free(self) -> int:
        return max(0, min([self._machine("MemAvailable"), *(limit - used for limit, used in self._limits())]))

    def used(self) -> int:
        return int((self._proc / "self" / "statm").read_text().split()[1]) * _PAGE_BYTES

    def peak_of(self, run: Callable[[], None]) -> int:
        before = self.used()
        with contextlib.suppress(OSError):  # without kernel support, the peak since the process's start is used
            (self._proc / "self" / "clear_refs").write_text("5")  # resets the peak to the resident size
        run()
        return max(0, _field(self._proc / "self" / "status", "VmHWM:") * 1024 - before)

    def _machine(self, name: str) -> int:
        return _field(self._proc / "meminfo", f"{name}:") * 1024

    def _limits(self) -> Iterator[tuple[int, int]]:
        """Yield (limit, used) of each control group of this process that has a memory limit, of both versions. Page
        cache that the kernel can drop does not count as used."""
        for line in (self._proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                root, names = self._control_groups, ("memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                root = self._control_groups / "memory"
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            else:
                continue
            own = root / path.lstrip("/")
            # in a container, the root is the container's own group, and the path may exist only on the host
            for folder in (root, *(own.parents[: len(own.parents) - len(root.parents) - 1]), own):
                limit = _number(folder / names[0])
                if limit is not None and limit < 1 << 62:  # in version 1, a number near 2^63 means no limit
                    yield limit, (_number(folder / names[1]) or 0) - _field(folder / "memory.stat", names[2])


def _number(path: Path) -> int | None:
    """Return the number in a file; None without the file, or if it has no number ("max")."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _field(path: Path, name: str) -> int:
    """Return the number of field `name` in a file of "name number" lines; 0 without the file or field."""
    try:
        fields = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return 0
    return next((int(field[1]) for field in fields if field[:1] == [name]), 0)


GRAPH_BYTES = 8 * 10**6  # bytes of a captured round, without its tensors; measured on an H200: 0.1 GB for 22 graphs
GRAPH_SHARE = 0.05  # limit of optional graphs, as a share of the memory that is free at the start
GRAPH_SHARE_OF_WEIGHTS = 0.1
GRAPH_BYTES_PER_SLOT = 30 * 10**6  # with more slots there are more graphs, of larger tensors: 25 MB for 192 on a 70B
FEW_GRAPHS_BYTES = 2 * 10**9
_MAX_WAIT_S = 10.0  # maximum wait until a killed process's memory is freed


@dataclass(frozen=True)
class StepPeaks:
    """Peak bytes of eager steps, in addition to permanent allocations. rounds: peak of steps without prompts."""

    rounds: int = 0
    all_steps: int = 0


class RankMemory:
    """The memory of one rank while it is built. Its methods are called in the order of their definition."""

    def __init__(self, memory: DeviceMemory, worker: WorkerConfig, layout: EngineLayout, device: torch.device) -> None:
        """Must run before any allocation. Waits until the rank that this one replaces has freed its memory."""
        self._memory = memory
        self._worker = worker
        self.device = device
        self._shares_host_memory = Capability.of(device).shares_host_memory
        if layout.memory is not None:
            wait_until_free(memory, layout.memory.rank_total)
        self._free_at_start = memory.free()
        self._used_at_start = memory.used()
        self._weights = self._activations = self._in_use = self._for_graphs = 0

    @property
    def runs_steps(self) -> bool:
        """Return whether the largest steps run: before KV is allocated, and again after all other allocations."""
        return Capability.of(self.device).captures_graphs

    @contextmanager
    def counting_weights(self) -> Iterator[None]:
        """Count memory allocated in this context as weights."""
        before = self.used()
        yield
        self._weights += self.used() - before

    def step_peaks(self, worker: Worker, layout: EngineLayout) -> StepPeaks:
        """Run each of the largest steps once, and return the peaks. worker: one without graphs."""
        peaks: dict[str, int] = {}
        for kind, plan in largest_steps(layout):
            peak = self._memory.peak_of(lambda plan=plan: run(worker, plan))  # type: ignore[misc]
            peaks[kind] = max(peaks.get(kind, 0), peak)
        return StepPeaks(peaks["rounds"], max(peaks.values()))

    def with_images(self, peaks: StepPeaks, encode: Callable[[], None], sizes: ImageSizes) -> StepPeaks:
        """Return the peaks with those of an image. encode: encodes the largest one. The embeddings of images are kept
        beside the largest step."""
        peak = max(peaks.all_steps, self._memory.peak_of(encode))
        return replace(peaks, all_steps=peak + sizes.cache_bytes + sizes.paused_bytes)

    def used(self) -> int:
        """Bytes that this rank has allocated so far."""
        return max(0, self._memory.used() - self._used_at_start)

    def capture_limits(self, group: TPGroup, num_slots: int | None = None) -> GraphCapture:
        """Return the limits of optional graphs: as configured, but at most `GRAPH_SHARE` of the memory, and beyond
        `FEW_GRAPHS_BYTES` at most `GRAPH_SHARE_OF_WEIGHTS` of what weights leave, and `GRAPH_BYTES_PER_SLOT`.

        num_slots: `SchedulerConfig.num_slots`; None: not known yet.
        """
        limits = self._worker.graph_capture
        needed = GRAPH_SHARE_OF_WEIGHTS * (self._free_at_start - self._weights)
        if num_slots is not None:
            needed = min(needed, GRAPH_BYTES_PER_SLOT * num_slots)
        max_bytes = min(GRAPH_SHARE * self._free_at_start, max(FEW_GRAPHS_BYTES, needed))
        max_gb = self._min_over_ranks(int(max_bytes), group) / 1e9
        return replace(limits, limit_gb=min(limits.limit_gb, max_gb))

    def settle_slots(self, layout: EngineLayout, group: TPGroup) -> EngineLayout:
        """Return the layout with a number for `scheduler.max_running`. Must run after the target is loaded."""
        if layout.scheduler.max_running != "auto":
            return layout
        cache = self._worker.cache
        if cache.num_pages is not None:
            kv_bytes = cache.num_pages * layout.bytes_per_page
        elif cache.memory_gb != "auto":
            kv_bytes = int(cache.memory_gb * 1e9)
        else:
            kv_bytes = self._default_kv_bytes(int(self.capture_limits(group).limit_gb * 1e9))
        tokens = min(TYPICAL_TOKENS, layout.max_model_len)
        kv_bytes -= layout.with_snapshots(kv_bytes).saved_bytes
        bytes_per_request = layout.bytes_per_page * tokens // cache.page_size + layout.bytes_per_slot
        if layout.window is not None:
            bytes_per_request += layout.bytes_per_window_page * layout.window_pages(min(tokens, layout.window))
        return layout.with_slots(self._min_over_ranks(slots_for(kv_bytes, bytes_per_request, self.device.type), group))

    def settle_pages(self, layout: EngineLayout, group: TPGroup, peaks: StepPeaks, num_graphs: int) -> EngineLayout:
        """Return the layout with its number of KV pages.

        num_graphs: graphs that are always captured. They share the memory of their tensors.
        Raises ValueError if the configured pages do not fit, or if no page fits.
        """
        cache, activations, graphs = self._worker.cache, peaks.all_steps, 0
        self._activations = activations
        if num_graphs:
            graphs = num_graphs * GRAPH_BYTES + peaks.rounds
            graphs += int(self.capture_limits(group, layout.scheduler.num_slots).limit_gb * 1e9)
        self._for_graphs = graphs
        kv_bytes = kv_bytes_asked(cache, layout.bytes_per_page, layout.slot_bytes, layout.bytes_per_snapshot)
        if kv_bytes is None:
            kv_bytes = self._default_kv_bytes(activations + graphs)
        layout = layout.with_snapshots(self._min_over_ranks(kv_bytes, group))
        saved = layout.saved_bytes
        available = self._min_over_ranks(self._available_bytes(activations + graphs) - saved, group)
        requested = pages_asked(layout, layout.slot_bytes + saved)
        if requested is None:
            counts = layout.pages_in(self._min_over_ranks(self._default_kv_bytes(activations + graphs) - saved, group))
            if counts.pages < 2 or (layout.window is not None and counts.windows < 2):
                fitting = self._fitting_pages(available, layout, activations, graphs)
                raise ValueError(f"cache.memory_gb=auto: only {fitting}")
            return layout.with_pages(*counts)
        if layout.kv_bytes(requested) > available:
            name = f"num_pages={cache.num_pages}" if cache.num_pages is not None else f"memory_gb={cache.memory_gb}"
            used = layout.kv_bytes(requested) - layout.kv_bytes(PageCounts(0))
            raise ValueError(
                f"cache.{name}: {requested.pages} pages take {used / 1e9:.3f} GB, but only "
                f"{self._fitting_pages(available, layout, activations, graphs)}"
            )
        return layout.with_pages(*requested)

    def kv_allocated(self) -> None:
        """Must be called once all KV pages are allocated. Later allocations count as graphs."""
        self._in_use = self.used()

    def use(self, layout: EngineLayout, graphs: GraphCount, group: TPGroup) -> MemoryUse:
        """Return the memory use of this rank, once it is ready. `left` is the minimum over the ranks. Frees torch's
        cached memory."""
        free = self._memory.free()
        after_kv = max(0, self.used() - self._in_use)
        for_graphs = max(after_kv, self._for_graphs) if graphs.num_waiting else after_kv
        kv = layout.kv_bytes(layout.page_counts) + layout.saved_bytes
        workspaces = self._in_use - self._weights - layout.slot_bytes - kv
        return MemoryUse(
            total=self._memory.total(),
            others=max(0, self._memory.total() - self._free_at_start),
            weights=self._weights,
            tables=layout.slot_bytes,
            workspaces=max(0, workspaces),
            activations=self._activations,
            graphs=for_graphs if graphs.num_captured else 0,
            kv=kv,
            left=self._min_over_ranks(free - self._activations - (for_graphs - after_kv), group),
        )

    def _available_bytes(self, reserved: int) -> int:
        """Return the maximum bytes for KV. reserved: bytes to leave for later allocations."""
        available = int(self._worker.cache.memory_share * self._free_at_start) - self.used() - reserved
        return available // self._worker.tensor_parallel if self._shares_host_memory else available

    def _default_kv_bytes(self, reserved: int) -> int:
        """Return the bytes for KV of `cache.memory_gb: auto`. reserved: as in `_available_bytes`."""
        available = self._available_bytes(reserved)
        return min(int(HOST_SHARE * available), HOST_LIMIT_BYTES) if self._shares_host_memory else available

    def _min_over_ranks(self, value: int, group: TPGroup) -> int:
        if group.size == 1:
            return value
        own = torch.tensor([value], dtype=torch.int64, device=self.device)
        return int(group.all_gather(own).min())

    def _fitting_pages(self, available: int, layout: EngineLayout, activations: int, graphs: int) -> str:
        """Return the end of an error text: the number of KV pages that fit, and the remedy."""
        counts = layout.pages_in(available)
        cache, kv_gb = self._worker.cache, max(0, layout.kv_bytes(counts)) / 1e9
        return (
            f"{max(0, counts.pages)} KV pages ({kv_gb:.3f} GB, or {kv_gb + layout.slot_bytes / 1e9:.3f} GB with the "
            f"tables of scheduler.max_running) fit into cache.memory_share={cache.memory_share:g} of the "
            f"{self._free_at_start / 1e9:.2f} GB that were free at the start, in addition to "
            f"{self.used() / 1e9:.2f} GB in use, {activations / 1e9:.2f} GB for the largest step and "
            f"{graphs / 1e9:.2f} GB for graphs"
            + (f" and {layout.saved_bytes / 1e9:.2f} GB for cache.state_snapshots" if layout.saved_bytes else "")
            + "; configure less, or raise parallel.tensor_parallel or cache.memory_share, or lower "
            "scheduler.max_running, scheduler.max_step_tokens or graph_capture.limit_gb"
        )


def slots_for(kv_bytes: int, request_bytes: int, device_type: str) -> int:
    """Return `max_running: auto`: the largest power of two of typical requests that fit into `kv_bytes`, within
    `AUTO_SLOTS`.

    request_bytes: KV and slot of a typical request.
    """
    min_slots, max_slots = AUTO_SLOTS[device_type]
    return min(max_slots, max(min_slots, 1 << max(0, (max(0, kv_bytes) // request_bytes).bit_length() - 1)))


def wait_until_free(
    memory: DeviceMemory,
    num_bytes: int,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait, at most ten seconds, until `num_bytes` are free. A killed process does not free its memory at once."""
    until_s = clock() + _MAX_WAIT_S
    while memory.free() < num_bytes and clock() < until_s:
        sleep(0.05)


@contextmanager
def must_fit(what: str, remedy: str) -> Iterator[None]:
    """Convert a GPU's out-of-memory error to a DeviceMemoryError that names `what` needed the memory, and the
    remedy."""
    try:
        yield
    except torch.OutOfMemoryError:
        free, total = torch.cuda.mem_get_info()
        raise DeviceMemoryError(
            f"not enough GPU memory for {what} ({free / 1e9:.1f} of {total / 1e9:.1f} GB are free): {remedy}"
        ) from None
