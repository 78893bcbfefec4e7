"""Why an engine's ranks could not be started."""


class WorkerGroupError(RuntimeError):
    """A worker group could not be started, or lost a rank; the message names the first cause."""


class StartRefusedError(WorkerGroupError):
    """A rank cannot be built from this configuration and these checkpoints on this device: another attempt would end
    alike."""
