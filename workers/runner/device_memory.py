"""How much memory the device of a rank has, how much is free, and what a piece of work takes at its peak. Used by
`workers.runner.memory`, which decides by it; knows nothing of models.

On a CPU that is what the kernel could still hand out, or less where the process stands in a control group with a limit:
containers are killed at theirs, whatever the machine has.
"""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch

from attention.capability import Capability

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class DeviceMemory(Protocol):
    """The memory that a rank computes in. All numbers are bytes."""

    def total(self) -> int:
        """Of the device, or of the process's control group if that may have less."""

    def free(self) -> int:
        """What could be allocated now, by whomever."""

    def used(self) -> int:
        """What is in use: on a GPU by all processes, on a CPU by this one."""

    def peak_of(self, run: Callable[[], None]) -> int:
        """What `run` takes at most beyond what is in use; all of it is free again afterwards."""


def device_memory(device: torch.device) -> DeviceMemory:
    """Of a rank's device."""
    return HostMemory() if Capability.of(device).shares_host_memory else CudaMemory(device)


class CudaMemory:
    """A GPU's, shared with other processes."""

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
        """Of what torch's allocator holds, which has more than the tensors: rounding, and pieces too small for use."""
        self._release()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)
        run()
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_reserved(self._device)
        self._release()
        return max(0, peak - before)

    def _release(self) -> None:
        """Give back what torch's allocator keeps for later."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()


class HostMemory:
    """A CPU's. proc, control_groups: where Linux shows it; others for tests."""

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
        with contextlib.suppress(OSError):  # not every kernel has it; then the peak since the process began counts
            (self._proc / "self" / "clear_refs").write_text("5")  # sets the peak to what is resident now
        run()
        return max(0, _field(self._proc / "self" / "status", "VmHWM:") * 1024 - before)

    def _machine(self, name: str) -> int:
        return _field(self._proc / "meminfo", f"{name}:") * 1024

    def _limits(self) -> Iterator[tuple[int, int]]:
        """(limit, used) of each control group with a memory limit that this process is in, of both versions. Files that
        the kernel could drop do not count as used."""
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
            # in a container the root is the container's own group, and the path one that only the host sees
            for folder in (root, *(own.parents[: len(own.parents) - len(root.parents) - 1]), own):
                limit = _number(folder / names[0])
                if limit is not None and limit < 1 << 62:  # version 1 says "no limit" with a number near 2^63
                    yield limit, (_number(folder / names[1]) or 0) - _field(folder / "memory.stat", names[2])


def _number(path: Path) -> int | None:
    """What a file of one number says; None if there is no such file, or no number ("max")."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _field(path: Path, name: str) -> int:
    """A field of a file of "name number" lines, 0 if there is none."""
    try:
        fields = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return 0
    return next((int(field[1]) for field in fields if field[:1] == [name]), 0)
