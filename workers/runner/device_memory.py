"""Total, free and peak memory of a rank's device. Used by `aerie.workers.runner.memory`.

On a CPU, free memory is the minimum of what the kernel can still allocate and what remains of the process's control
group limits, because a container is killed at its own limit.
"""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch

from aerie.kernels.capability import Capability

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
