"""A rank's memory use: a plain value from `aerie.workers.runner.memory`, for reports.

Imports no torch."""

from dataclasses import dataclass

# default KV memory on a CPU: a share of free memory, because other processes need memory, too, and its limit
HOST_SHARE, HOST_LIMIT_BYTES = 0.1, 10**9


class DeviceMemoryError(ValueError):
    """A GPU lacks memory now. Unlike other refusals of a start this may be temporary: a killed process holds its memory
    for a moment."""


@dataclass(frozen=True)
class MemoryUse:
    """A rank's device memory in bytes, by use. `total` and `others` concern the whole device.

    total: memory of the device.
    others: memory used at the start by other processes and by the device's own context.
    weights: weights of target and draft.
    tables: tables of slots.
    workspaces: buffers of communication, libraries and kernels.
    activations: activations of the largest step that runs without a graph.
    graphs: memory of captures; if more will follow, at least the reserve for all of them.
    kv: all pages and saved states.
    left: memory that was free when the rank was ready, minus its activations and the reserve for graphs.
    """

    total: int
    others: int
    weights: int
    tables: int
    workspaces: int
    activations: int
    graphs: int
    kv: int
    left: int

    @property
    def rank_total(self) -> int:
        """Return the peak memory of a rank."""
        return self.weights + self.tables + self.workspaces + self.activations + self.graphs + self.kv
