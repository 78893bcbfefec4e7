"""What is known of an engine before anything is loaded, and what speculation adds to one: the interface through which
`speculative.build` takes part in `workers.runner.build`, which knows nothing of drafts. Building a rank settles what a
configuration leaves to it: KV pages, slots."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from attention.capability import Capability
from attention.config import CacheConfig
from attention.kv_cache.latent import keeps_latent_rows
from attention.kv_cache.layout import LayerGroup
from attention.kv_cache.pool import KVPool, bytes_per_page
from attention.metadata import Mode
from attention.registry import Choice
from workers.config import AUTO_SLOTS, RoundShapes, SchedulerConfig, WorkerConfig
from workers.device import resolve_device, resolve_dtype
from workers.distributed.tp_group import TPGroup
from workers.models.config import ModelConfig
from workers.runner.backends import Backends
from workers.runner.decoding import Autoregressive, CuttableStrategy
from workers.runner.model_runner import TargetRunner
from workers.sampling.sampler import Sampler
from workers.slots.slot_table import SlotTable
from workers.structured_output.mask_table import mask_bytes
from workers.structured_output.slot_grammars import SlotGrammars

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

    @property
    def heeds_no_choice(self) -> bool:
        """Whether drafts are accepted whatever the target chose, for benchmarks."""

    def kv_groups(self, dtype: torch.dtype) -> Sequence[LayerGroup]:
        """Of the layers whose KV is kept beside the target's, in as many pages of the same ids."""

    def attention(self, page_size: int, dtype: torch.dtype, device: Capability) -> list[Choice]:
        """The backends that are named for the models beside the target."""

    def weight_bytes(self, tensor_parallel: int, dtype: torch.dtype, multiplies_fp8: bool) -> int:
        """Of what is loaded beside the target on each rank, at most. multiplies_fp8: as for
        `workers.models.weight_bytes.weight_bytes`."""

    def strategy(self, parts: "EngineParts", backends: Backends, done: PhaseDone) -> CuttableStrategy:
        """Loads what drafts. backends: of `attention`. done: hears each phase that ends.
        Raises ValueError where a checkpoint does not fit."""


@dataclass(frozen=True)
class EngineLayout:
    """What follows from a configuration and the checkpoints' config.json, the same on every rank and in the scheduler.

    dtype: of weights and KV.
    bytes_per_page, bytes_per_slot: on each rank, of a KV page in target and draft, and of a slot's row in all tables.
    max_model_len: prompt and answer tokens.
    max_position: positions that a step may touch.
    scheduler: the configuration's, with numbers in place of "auto"; of `max_running` once a rank is built.
    known_pages: of a rank that is built; before that of a configuration that gives their number.
    rank_bytes: the most device memory that a rank takes, once one was built.
    eager: see `RoundShapes`.
    """

    target: ModelConfig
    dtype: torch.dtype
    bytes_per_page: int
    bytes_per_slot: int
    max_model_len: int
    max_position: int
    scheduler: SchedulerConfig
    speculation: Speculation
    known_pages: int | None = None
    rank_bytes: int = 0
    eager: bool = False

    @property
    def num_pages(self) -> int:
        """KV pages of each rank."""
        assert self.known_pages is not None, "only a rank that is built knows how many pages fit"
        return self.known_pages

    @property
    def slot_bytes(self) -> int:
        """Memory of the tables of running requests on each rank."""
        return table_bytes(self.bytes_per_slot, self.scheduler.num_slots)

    def with_slots(self, num_slots: int) -> "EngineLayout":
        """With a number for `max_running`."""
        return replace(self, scheduler=self.scheduler.with_slots(num_slots))

    def with_pages(self, num_pages: int) -> "EngineLayout":
        """With so many KV pages."""
        return replace(self, known_pages=num_pages)

    def as_built(self, num_pages: int, num_slots: int, rank_bytes: int) -> "EngineLayout":
        """For a rank that takes the place of one that was built so: nothing is measured again."""
        return replace(self.with_slots(num_slots).with_pages(num_pages), rank_bytes=rank_bytes)

    @property
    def shapes(self) -> RoundShapes:
        """See `Speculation.shapes`."""
        return replace(self.speculation.shapes, eager=self.eager)

    @property
    def mask_width(self) -> int:
        """Rows of a request in a step, each of which a grammar may mask."""
        return _mask_width(self.shapes)

    @property
    def keeps_latent_rows(self) -> bool:
        """Whether layers of the target do."""
        return keeps_latent_rows(self.target.kv_groups(1, self.dtype))

    @property
    def lookahead(self) -> int:
        """See `Speculation.lookahead`."""
        return self.speculation.lookahead


@dataclass(frozen=True)
class EngineParts:
    """One rank of an engine, all but its strategy.

    pool_beside: of the layers of `Speculation.kv_groups`.
    """

    worker: WorkerConfig
    layout: EngineLayout
    group: TPGroup
    target: TargetRunner
    pool_beside: KVPool
    slots: SlotTable
    sampler: Sampler
    grammars: SlotGrammars

    @property
    def pools(self) -> tuple[KVPool, KVPool]:
        """The KV of target and draft."""
        return self.target.pool, self.pool_beside

    def allocate_pages(self, num_pages: int) -> None:
        """Take memory for so many KV pages, in the place of what there is."""
        for pool in self.pools:
            pool.allocate(num_pages)


@dataclass(frozen=True)
class NoSpeculation:
    """The `Speculation` of an engine that decodes token by token."""

    shapes: RoundShapes = RoundShapes()  # noqa: RUF009 - frozen
    captured_layers: tuple[int, ...] = ()
    lookahead: int = 0
    heeds_no_choice: bool = False

    @property
    def verified_modes(self) -> Mapping[Mode, bool]:
        return {}

    def kv_groups(self, dtype: torch.dtype) -> Sequence[LayerGroup]:
        return ()

    def attention(self, page_size: int, dtype: torch.dtype, device: Capability) -> list[Choice]:
        return []

    def weight_bytes(self, tensor_parallel: int, dtype: torch.dtype, multiplies_fp8: bool) -> int:
        return 0

    def strategy(self, parts: EngineParts, backends: Backends, done: PhaseDone) -> CuttableStrategy:
        return Autoregressive(parts.target, parts.slots, parts.sampler)


def plan_layout(
    worker: WorkerConfig,
    target: ModelConfig,
    speculation: Speculation = NoSpeculation(),  # noqa: B008 - frozen
) -> EngineLayout:
    """target: as `workers.models.loading.read_target_config` gives it. Raises ValueError where no KV page fits into
    `cache.memory_gb`."""
    device = Capability(resolve_device(worker.model.device, 0).type)
    dtype = resolve_dtype(worker.model.dtype, target.dtype, device)
    groups = [*target.kv_groups(worker.tensor_parallel, dtype), *speculation.kv_groups(dtype)]
    max_model_len = worker.model.max_model_len or target.max_position
    shapes = speculation.shapes
    max_position = max_model_len + 3 * (shapes.max_kv_tokens + shapes.max_new_tokens)  # two rounds in flight past it
    bytes_per_slot = _bytes_per_slot(worker.cache, max_position, target.vocab_size)
    bytes_per_slot += mask_bytes(_mask_width(shapes), target.vocab_size)
    per_page, scheduler = bytes_per_page(groups, worker.cache.page_size), worker.scheduler
    least_slots = AUTO_SLOTS["cpu"][0] if scheduler.max_running == "auto" else scheduler.num_slots
    asked = pages_asked(worker.cache, per_page, table_bytes(bytes_per_slot, least_slots))
    return EngineLayout(
        target=target,
        dtype=dtype,
        bytes_per_page=per_page,
        bytes_per_slot=bytes_per_slot,
        max_model_len=max_model_len,
        max_position=max_position,
        scheduler=scheduler.resolved(device.type),
        speculation=speculation,
        known_pages=None if scheduler.max_running == "auto" and worker.cache.num_pages is None else asked,
        eager=not device.captures_graphs or not worker.cuda_graphs,
    )


def slot_table(worker: WorkerConfig, layout: EngineLayout, device: torch.device) -> SlotTable:
    """The table of an engine's running requests, with pages for `max_position` positions each."""
    max_pages = -(-layout.max_position // worker.cache.page_size)
    return SlotTable(layout.scheduler.num_slots, max_pages, layout.target.vocab_size, device)


def table_bytes(bytes_per_slot: int, num_slots: int) -> int:
    """Of the tables of so many slots, and the padding slot."""
    return bytes_per_slot * (num_slots + 1)


def _mask_width(shapes: RoundShapes) -> int:
    return max(shape.width for shape in shapes.shapes)


def _bytes_per_slot(cache: CacheConfig, max_position: int, vocab_size: int) -> int:
    max_pages = -(-max_position // cache.page_size)
    return SlotTable(0, max_pages, vocab_size, torch.device("meta")).num_bytes  # of the padding slot's row alone


def pages_asked(cache: CacheConfig, per_page: int, slot_bytes: int) -> int | None:
    """Pages of each rank that a configuration asks for, None for what is left: cache.num_pages, or as many of per_page
    bytes as memory_gb holds beside the slot_bytes that running requests' tables take. Raises ValueError if it holds
    none."""
    if cache.num_pages is not None:
        return cache.num_pages
    if cache.memory_gb == "auto":
        return None
    pages = (int(cache.memory_gb * 1e9) - slot_bytes) // per_page - 1
    if pages < 2:
        raise ValueError(
            f"cache.memory_gb={cache.memory_gb}: holds {max(0, pages)} pages of {per_page} bytes beside {slot_bytes} "
            f"of tables for scheduler.max_running; give at least {(3 * per_page + slot_bytes) / 1e9:.4f}, or auto"
        )
    return pages
