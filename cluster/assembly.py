"""Configuration -> the parts of one engine, without Ray and without HTTP: Serve, benchmarks and tests build the same.

Where a rank comes from is an argument (a `RankFactory`), so that tests can script one. torch is imported only by
whoever builds a rank or reads a checkpoint's configuration.
"""

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from cluster.config import AerieConfig
from workers.config import RoundShape
from workers.runner.executor import StepExecutor
from workers.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from speculative.build import EngineSpec

DEVICE_RANK = "cluster.assembly:DeviceRank"

PhaseReport = Callable[[str, float], None]


@dataclass(frozen=True)
class Layout:
    """What follows from the configuration and the checkpoints, the same for the scheduler and on every rank.

    shapes: kinds of round, plain first. num_pages: KV pages per rank. max_model_len: prompt and answer tokens.
    lookahead: tokens beyond a page that its KV depends on. num_draft_tokens: drafted per round, 0 without a draft.
    """

    shapes: tuple[RoundShape, ...]
    num_pages: int
    max_model_len: int
    lookahead: int
    num_draft_tokens: int


class RankParts(Protocol):
    """One rank before it is built."""

    @property
    def device_name(self) -> str:
        """What it computes on, for the operator."""

    def layout(self) -> Layout:
        """Reads and checks the checkpoints' configurations; raises ValueError naming value, rule and remedy."""

    def build(self, rendezvous: str, report: PhaseReport) -> StepExecutor:
        """Joins the other ranks at `rendezvous` ("tcp://host:port" on rank 0's node), loads, allocates and warms up;
        `report` hears each phase and its seconds."""


RankFactory = Callable[[AerieConfig, int], RankParts]


def load_factory(path: str) -> RankFactory:
    """The rank factory named "module:attribute"."""
    module, _, name = path.partition(":")
    return cast(RankFactory, getattr(importlib.import_module(module), name))


def build_scheduler(config: AerieConfig, layout: Layout) -> Scheduler:
    """The scheduler of one engine."""
    return Scheduler(
        config.scheduler,
        config.cache,
        layout.num_pages,
        layout.max_model_len,
        time.monotonic,
        layout.shapes,
        layout.lookahead,
    )


def engine_spec(config: AerieConfig) -> "EngineSpec":
    """What the layers below are told about one engine."""
    from speculative.build import EngineSpec

    return EngineSpec(config.worker, config.speculative, config.draft_attention)


class DeviceRank:
    """A rank that computes: target, draft, KV pools and decoding on one device."""

    def __init__(self, config: AerieConfig, rank: int) -> None:
        import torch

        from speculative.build import plan_layout

        self._rank = rank
        self._spec = engine_spec(config)
        self._layout = plan_layout(self._spec)
        self._num_threads = config.engine.threads_per_worker
        cuda = config.model.device == "cuda"
        self.device_name = torch.cuda.get_device_name(0) if cuda else f"cpu, {self._num_threads} thread(s)"

    def layout(self) -> Layout:
        """See `RankParts`."""
        layout, speculative = self._layout, self._spec.speculative
        return Layout(
            shapes=layout.shapes,
            num_pages=layout.num_pages,
            max_model_len=layout.max_model_len,
            lookahead=layout.lookahead,
            num_draft_tokens=0 if speculative is None else speculative.num_draft_tokens - 1,
        )

    def build(self, rendezvous: str, report: PhaseReport) -> StepExecutor:
        """See `RankParts`."""
        import torch

        from speculative.build import build_worker

        torch.set_num_threads(self._num_threads)
        return build_worker(self._spec, self._layout, self._rank, rendezvous, report)
