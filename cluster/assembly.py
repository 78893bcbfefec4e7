"""Configuration -> the parts of one engine, without Ray and without HTTP: Serve, benchmarks and tests build the same.

Where a rank comes from is an argument (a `RankFactory`), so that tests can script one. torch is imported only by
whoever builds a rank or reads a checkpoint's configuration.
"""

import dataclasses
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from cluster.config import AerieConfig, ConfigError
from cluster.http.tokenizer import ChatTokenizer
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


def with_checkpoints(config: AerieConfig) -> AerieConfig:
    """The configuration with what only the checkpoints know: model.max_model_len. Reads config.json of target and draft
    and the tokenizer, and matches them; raises ConfigError. Takes the seconds of importing torch."""
    try:
        rank = DeviceRank(_on_cpu(config), 0)
        layout = rank.layout()
        rank.check_tokenizer()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    model = dataclasses.replace(config.model, max_model_len=layout.max_model_len)
    return config.model_copy(update={"model": model})


def slot_bytes(config: AerieConfig) -> int:
    """Memory of the tables of running requests on each rank, of a configuration that `with_checkpoints` gave."""
    from speculative.build import plan_layout

    return plan_layout(engine_spec(_on_cpu(config))).slot_bytes


def _on_cpu(config: AerieConfig) -> AerieConfig:
    """Whatever the workers use: the machine that checks need not have their GPUs."""
    return config.model_copy(update={"model": dataclasses.replace(config.model, device="cpu")})


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

    def check_tokenizer(self) -> None:
        """Raises ValueError if the tokenizer knows tokens that the target has no embedding for: one in a prompt would
        end the worker."""
        path = self._spec.worker.model.path
        known, embedded = ChatTokenizer.from_folder(path).vocab_size, self._layout.target.vocab_size
        if known > embedded:
            raise ValueError(
                f"model.path={path}: its tokenizer has {known} tokens, its config.json vocab_size="
                f"{embedded}; use the tokenizer that the model was trained with"
            )

    def build(self, rendezvous: str, report: PhaseReport) -> StepExecutor:
        """See `RankParts`."""
        import torch

        from speculative.build import build_worker

        torch.set_num_threads(self._num_threads)
        return build_worker(self._spec, self._layout, self._rank, rendezvous, report)
