"""The configuration's section for parallelism: number of engines, ranks per engine, and their placement."""

from dataclasses import dataclass
from typing import Annotated, Literal

from aerie.attention.setting import Setting, check_settings

Strategy = Literal["auto", "STRICT_PACK", "PACK", "STRICT_SPREAD"]


@dataclass(frozen=True)
class ReplicasConfig:
    """A range of engines, by load (`aerie.cluster.replica.engine`).

    min, max: engines.
    up_after_s, down_after_s: how long the load must require more, or fewer, before engines are added or removed.
    """

    min: int
    max: int
    up_after_s: Annotated[float, Setting(ge=0)] = 10.0
    down_after_s: Annotated[float, Setting(ge=0)] = 300.0

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.max:
            raise ValueError(f"min={self.min}, max={self.max}: min must be at least 1, and max not below it")
        check_settings(self)

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

    tensor_parallel: Annotated[int, Setting("--tensor-parallel-size -tp --tp-size --tp --tensor-parallel", ge=1)] = 1
    expert_parallel: Annotated[bool, Setting("--enable-expert-parallel -ep")] = False
    replicas: Annotated[
        int | ReplicasConfig,
        Setting("--data-parallel-size -dp --dp-size --dp", ge=1, note="engines behind one address"),
    ] = 1
    strategy: Strategy = "auto"
    autoscaling: bool = False

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def min_replicas(self) -> int:
        """Minimum number of engines."""
        return self.replicas if isinstance(self.replicas, int) else self.replicas.min
