"""What is known of an engine before anything is loaded, and what speculation adds to one: the interface through which
`speculative.build` takes part in `workers.runner.build`, which knows nothing of drafts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from attention.kv_cache.layout import LayerGroup
from attention.metadata import Mode
from workers.config import RoundShapes, SchedulerConfig, WorkerConfig
from workers.device import resolve_device, resolve_dtype
from workers.distributed.tp_group import TPGroup
from workers.models.config import ModelConfig
from workers.models.loading import pages_that_fit
from workers.runner.backends import Backends
from workers.runner.decoding import Autoregressive, DecodingStrategy
from workers.runner.model_runner import TargetRunner
from workers.sampling.sampler import Sampler
from workers.slots.slot_table import SlotTable

PhaseDone = Callable[[str], None]


class Speculation(Protocol):
    """What speculation adds to an engine; `NoSpeculation` adds nothing. A plain value until `strategy` is called: it
    travels to every rank and is the same on each."""

    @property
    def shapes(self) -> RoundShapes:
        """The shapes that rounds may have."""

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """Layers of the target whose input its passes return beside the hidden states."""

    @property
    def lookahead(self) -> int:
        """Tokens after a page that the page's KV depends on, which the prefix cache's keys must hold."""

    @property
    def verified_modes(self) -> Mapping[Mode, bool]:
        """The modes in which rounds run the target beside DECODE, and whether their masks branch."""

    def kv_groups(self, dtype: torch.dtype) -> Sequence[LayerGroup]:
        """Of the layers whose KV is kept beside the target's, in as many pages of the same ids."""

    def backends(self, page_size: int, dtype: torch.dtype, device: torch.device) -> Backends:
        """Of the models beside the target; raises ValueError where one cannot do what it is named for."""

    def strategy(self, parts: "EngineParts", backends: Backends, done: PhaseDone) -> DecodingStrategy:
        """Loads what drafts and allocates its KV. backends: what `backends` chose. done: hears each phase that ends.
        Raises ValueError where a checkpoint does not fit."""


@dataclass(frozen=True)
class EngineLayout:
    """What follows from a configuration and the checkpoints' config.json, the same on every rank and in the scheduler.

    dtype: of weights and KV.
    num_pages, slot_bytes: per rank, of the KV and of running requests' tables.
    max_model_len: prompt and answer tokens.
    max_position: positions that a step may touch.
    scheduler: the configuration's, with numbers in place of "auto".
    """

    target: ModelConfig
    dtype: torch.dtype
    num_pages: int
    slot_bytes: int
    max_model_len: int
    max_position: int
    scheduler: SchedulerConfig
    speculation: Speculation

    @property
    def shapes(self) -> RoundShapes:
        """See `Speculation.shapes`."""
        return self.speculation.shapes

    @property
    def lookahead(self) -> int:
        """See `Speculation.lookahead`."""
        return self.speculation.lookahead


@dataclass(frozen=True)
class EngineParts:
    """One rank of an engine, all but its strategy."""

    worker: WorkerConfig
    layout: EngineLayout
    group: TPGroup
    target: TargetRunner
    slots: SlotTable
    sampler: Sampler


@dataclass(frozen=True)
class NoSpeculation:
    """The `Speculation` of an engine that decodes token by token."""

    shapes: RoundShapes = RoundShapes()  # noqa: RUF009 - frozen
    captured_layers: tuple[int, ...] = ()
    lookahead: int = 0

    @property
    def verified_modes(self) -> Mapping[Mode, bool]:
        return {}

    def kv_groups(self, dtype: torch.dtype) -> Sequence[LayerGroup]:
        return ()

    def backends(self, page_size: int, dtype: torch.dtype, device: torch.device) -> Backends:
        return {}

    def strategy(self, parts: EngineParts, backends: Backends, done: PhaseDone) -> DecodingStrategy:
        return Autoregressive(parts.target, parts.slots, parts.sampler)


def plan_layout(
    worker: WorkerConfig,
    target: ModelConfig,
    speculation: Speculation = NoSpeculation(),  # noqa: B008 - frozen
) -> EngineLayout:
    """target: as `workers.models.loading.read_target_config` gives it. Raises ValueError where no KV page fits."""
    device = resolve_device(worker.model.device, 0)
    dtype = resolve_dtype(worker.model.dtype, target.dtype, device)
    groups = [*target.kv_groups(worker.tensor_parallel, dtype), *speculation.kv_groups(dtype)]
    max_model_len = worker.model.max_model_len or target.max_position
    shapes = speculation.shapes
    max_position = max_model_len + 3 * (shapes.max_kv_tokens + shapes.max_new_tokens)  # two rounds in flight past it
    slot_bytes = slot_table(worker, max_position, target.vocab_size, torch.device("meta")).num_bytes
    return EngineLayout(
        target=target,
        dtype=dtype,
        num_pages=pages_that_fit(worker.cache, groups, slot_bytes),
        slot_bytes=slot_bytes,
        max_model_len=max_model_len,
        max_position=max_position,
        scheduler=worker.scheduler.resolved(device.type),
        speculation=speculation,
    )


def slot_table(worker: WorkerConfig, max_position: int, vocab_size: int, device: torch.device) -> SlotTable:
    """The table of an engine's running requests, with pages for `max_position` positions each."""
    max_pages = -(-max_position // worker.cache.page_size)
    return SlotTable(worker.scheduler.max_running, max_pages, vocab_size, device)
