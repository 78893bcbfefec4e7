"""The section `parallel` of the configuration: how many engines, of how many workers, and where."""

from dataclasses import dataclass
from typing import Literal

Strategy = Literal["auto", "STRICT_PACK", "PACK", "STRICT_SPREAD"]


@dataclass(frozen=True)
class ReplicasConfig:
    """A range of engines, by load (`aerie.cluster.replica.scaling`).

    min, max: engines.
    up_after_s, down_after_s: how long the load must require more, or fewer, before engines are added or removed.
    """

    min: int
    max: int
    up_after_s: float = 10.0
    down_after_s: float = 300.0

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.max:
            raise ValueError(f"min={self.min}, max={self.max}: min must be at least 1, and max not below it")
        for name in ("up_after_s", "down_after_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 0 seconds")

    def __str__(self) -> str:
        return f"{self.min} to {self.max}"


@dataclass(frozen=True)
class ParallelConfig:
    """Number of engines, their ranks, and their placement.

    tensor_parallel: ranks of one engine, each with one GPU or one CPU process.
    expert_parallel: each rank of a mixture of experts holds some experts whole, instead of a slice of each.
    replicas: engines; or a range by load: `{min: 1, max: 4, up_after_s: 10, down_after_s: 300}`.
    strategy: placement of an engine's ranks: `STRICT_PACK` on one node, `PACK` on as few nodes as possible,
        `STRICT_SPREAD` each on its own; auto: `STRICT_PACK` if all engines fit so, else `PACK`.
    autoscaling: an engine that does not fit waits for new nodes.
    """

    tensor_parallel: int = 1
    expert_parallel: bool = False
    replicas: int | ReplicasConfig = 1
    strategy: Strategy = "auto"
    autoscaling: bool = False

    def __post_init__(self) -> None:
        for name, value in (("tensor_parallel", self.tensor_parallel), ("replicas", self.replicas)):
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")

    @property
    def min_replicas(self) -> int:
        """Minimum number of engines."""
        return self.replicas if isinstance(self.replicas, int) else self.replicas.min
