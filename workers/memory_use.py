"""A rank's memory use: a plain value from `workers.runner.memory`, shown to the operator.

Imports no torch."""

from dataclasses import dataclass

# default KV memory on a CPU: share of free memory, which other processes need too, and its limit
HOST_SHARE, HOST_LIMIT_BYTES = 0.1, 10**9


class DeviceMemoryError(ValueError):
    """A GPU has not the memory now. Unlike other refusals of a start this may pass: a process that has just been killed
    holds its memory for a moment."""


@dataclass(frozen=True)
class MemoryUse:
    """A rank's device memory in bytes, by use. `total` and `others` concern the whole device.

    total: of the device.
    others: in use at the start, by other processes and by the device's own context.
    weights: of target and draft.
    tables: of slots.
    workspaces: what communication, libraries and kernels hold beside.
    activations: of the largest step that runs without a graph.
    graphs: what captures took, or if more are to follow at least what is kept for all of them.
    kv: of all pages and saved states.
    left: free once the rank was ready, its activations and what is kept for graphs not counted as free.
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
    def of_rank(self) -> int:
        """Return the peak memory of a rank."""
        return self.weights + self.tables + self.workspaces + self.activations + self.graphs + self.kv
