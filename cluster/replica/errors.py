"""Errors of an engine's start."""


class WorkerGroupError(RuntimeError):
    """A worker group could not be started, or lost a rank. The message names the first cause."""


class StartRefusedError(WorkerGroupError):
    """A rank cannot be built from this configuration, these checkpoints and this device, so another attempt would fail
    too."""
