"""`EnginePlan`, which is computed before weights are loaded, and `Speculation`, the interface by which
`aerie.workers.runner.build` adds a draft."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from aerie.attention.config import CacheConfig
from aerie.attention.kv_cache.layout import ExpertIds, HeadsLayout, LayerGroup, has_latent_rows
from aerie.attention.kv_cache.pool import KVPool, bytes_per_page
from aerie.attention.recurrent.layout import chunk_bytes, saved_dtype, slot_bytes, snapshot_bytes
from aerie.attention.recurrent.pool import StatePool
from aerie.attention.registry import Choice
from aerie.kernels.capability import Capability
from aerie.kernels.kv.batches import Mode
from aerie.kernels.kv.stored_values import FP8
from aerie.workers.config import AUTO_SLOTS, RoundShapes, SchedulerConfig, WorkerConfig
from aerie.workers.device import resolve_device, resolve_dtype
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.engine_layout import EngineLayout, kv_bytes_asked, pages_asked, table_bytes
from aerie.workers.models.config import ModelConfig
from aerie.workers.prompt_inputs import ImageSizes
from aerie.workers.quantization.kv_scheme import kv_dtype
from aerie.workers.runner.backends import Backends
from aerie.workers.runner.decoding import Autoregressive, CuttableStrategy, DecodingStrategy
from aerie.workers.runner.model_runner import TargetRunner
from aerie.workers.runner.rank_adapters import RankAdapters
from aerie.workers.runner.routed_experts import ExpertRecord
from aerie.workers.runner.weight_update import RunningModel
from aerie.workers.runner.worker import LateCaptures, Worker
from aerie.workers.sampling import Sampler
from aerie.workers.slots import SlotTable
from aerie.workers.structured_output.mask_table import mask_bytes
from aerie.workers.structured_output.slot_grammars import SlotGrammars
from aerie.workers.vision.config import VisionConfig, vision_of
from aerie.workers.vision.tower import VisionTower, image_sizes

PhaseDone = Callable[[str], None]


class Speculation(Protocol):
    """The parts that a draft adds to an engine. A plain value, equal on all ranks; `strategy` loads the draft."""

    @property
    def shapes(self) -> RoundShapes:
        """Tree shapes that rounds may verify and draft."""

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs a pass returns in addition to the last hidden states."""

    @property
    def lookahead(self) -> int:
        """Tokens after a page that the page's KV depends on; keys of the prefix cache include them."""

    @property
    def verified_modes(self) -> Mapping[Mode, bool]:
        """Modes besides DECODE in which rounds run the target; the value says whether masks branch in that mode."""

    @property
    def has_synthetic_acceptance(self) -> bool:
        """Whether drafts are accepted regardless of the target's choice, for benchmarks."""

    def kv_groups(self, dtype: torch.dtype) -> Sequence[LayerGroup]:
        """The draft's layers with KV of their own, in pages with the target's page ids. dtype: the model's dtype."""

    def attention(self, page_size: int, dtype: torch.dtype, device: Capability) -> list[Choice]:
        """Configured attention backends of the draft."""

    def weight_bytes(self, tensor_parallel: int, dtype: torch.dtype, multiplies_fp8: bool) -> int:
        """Maximum bytes of the draft's weights on each rank. multiplies_fp8: as for
        `aerie.workers.models.weights.weight_bytes`."""

    def strategy(self, parts: "EngineParts", backends: Backends, done: PhaseDone) -> CuttableStrategy:
        """Load the draft, and return the strategy.

        backends: the draft's.
        done: called after each phase.
        Raises ValueError if a checkpoint does not fit.
        """


@dataclass(frozen=True)
class EnginePlan:
    """An engine before weights are loaded: the configurations of its models, and the layout.

    dtype: dtype of weights.
    kv_dtype: dtype of the target's KV; `speculation` chooses the draft's.
    """

    target: ModelConfig
    dtype: torch.dtype
    kv_dtype: torch.dtype
    speculation: Speculation
    layout: EngineLayout
    vision: VisionConfig | None = None

    def target_groups(self, tensor_parallel: int) -> tuple[LayerGroup, ...]:
        """Return the layer groups of the target's KV on a rank. Windowed layers have separate groups."""
        groups = split_windows(self.target, self.target.kv_groups(tensor_parallel, self.kv_dtype), self.layout.window)
        return groups + expert_groups(self.target, self.layout.cache)


@dataclass(frozen=True)
class EngineParts:
    """One rank of an engine, without its strategy.

    draft_pool: KV of the layers of `Speculation.kv_groups`.
    models: models whose weights can be loaded again; `Speculation.strategy` adds "draft".
    tower: encodes images; None in an engine that takes none.
    adapters: None in engines without adapters.
    experts: None in engines that do not record them.
    """

    worker: WorkerConfig
    layout: EngineLayout
    group: TPGroup
    target: TargetRunner
    draft_pool: KVPool
    slots: SlotTable
    sampler: Sampler
    grammars: SlotGrammars
    models: dict[str, RunningModel]
    tower: VisionTower | None = None
    adapters: RankAdapters | None = None
    experts: ExpertRecord | None = None

    @property
    def pools(self) -> tuple[KVPool, KVPool]:
        """The KV pools of target and draft."""
        return self.target.pool, self.draft_pool

    @property
    def states(self) -> StatePool | None:
        """States of the target's recurrent layers, if it has any."""
        return self.target.states

    def worker_of(self, strategy: DecodingStrategy, captures: LateCaptures | None = None) -> Worker:
        """Return the rank's worker with a strategy. captures: None without graphs."""
        slot_parts = (self.slots, self.group, self.worker.debug, self.grammars, captures)
        return Worker(strategy, *slot_parts, self.pools, self.states, self.tower, self.adapters)

    def allocate(self, layout: EngineLayout) -> None:
        """Replace the KV pages and snapshots with empty ones, in the numbers of the layout."""
        for pool in self.pools:
            pool.allocate(layout.num_pages, layout.known_window_pages)
        if self.states is not None:
            self.states.allocate(layout.num_snapshots)


class WithoutDraftModel:
    """What of `Speculation` concerns a draft model, for engines without one."""

    captured_layers: tuple[int, ...] = ()
    lookahead: int = 0

    def kv_groups(self, dtype: torch.dtype) -> Sequence[LayerGroup]:
        return ()

    def attention(self, page_size: int, dtype: torch.dtype, device: Capability) -> list[Choice]:
        return []

    def weight_bytes(self, tensor_parallel: int, dtype: torch.dtype, multiplies_fp8: bool) -> int:
        return 0


@dataclass(frozen=True)
class NoSpeculation(WithoutDraftModel):
    """`Speculation` of non-speculative decoding."""

    shapes: RoundShapes = RoundShapes()  # noqa: RUF009 - frozen
    has_synthetic_acceptance: bool = False

    @property
    def verified_modes(self) -> Mapping[Mode, bool]:
        return {}

    def strategy(self, parts: EngineParts, backends: Backends, done: PhaseDone) -> CuttableStrategy:
        return Autoregressive(parts.target, parts.slots, parts.sampler)


def plan_engine(
    worker: WorkerConfig,
    target: ModelConfig,
    speculation: Speculation = NoSpeculation(),  # noqa: B008 - frozen
    device: Capability | None = None,
) -> EnginePlan:
    """Compute all sizes of an engine that do not depend on the memory of its ranks.

    target: the result of `aerie.workers.models.loading.read_target_config`.
    device: device of the ranks, which this process need not have; None: the configured device in this process.
    Raises ValueError if no KV page fits into `cache.memory_gb`.
    """
    device = device or Capability(resolve_device(worker.model.device, 0).type)
    dtype = resolve_dtype(worker.model.dtype, target.dtype, device)
    kv_type = kv_dtype(worker.cache.dtype, target.kv_scheme, dtype)
    recurrent = target.state_groups(worker.tensor_parallel, dtype)
    max_model_len = worker.model.max_model_len or target.max_position
    target_groups = target.kv_groups(worker.tensor_parallel, kv_type)
    window = None if recurrent else longest_window(target, target_groups, max_model_len)
    target_groups = split_windows(target, target_groups, window) + expert_groups(target, worker.cache)
    shapes = replace(speculation.shapes, eager=not device.captures_graphs or not worker.cuda_graphs)
    # two rounds in flight may write after max_model_len
    max_position = max_model_len + 3 * (shapes.max_kv_tokens + shapes.max_new_tokens)
    vision = vision_of(worker.model, target.served_by)
    scheduler, cache = worker.scheduler.resolved(device.type), worker.cache
    if recurrent and cache.state_snapshots == 0:  # without snapshots no request could resume from cached pages
        cache = replace(cache, prefix_cache=False)
    layout = EngineLayout(
        shapes=shapes,
        scheduler=scheduler,
        cache=cache,
        max_model_len=max_model_len,
        max_position=max_position,
        lookahead=speculation.lookahead,
        bytes_per_page=bytes_per_page([*target_groups, *speculation.kv_groups(dtype)], cache.page_size),
        window=window,
        bytes_per_window_page=bytes_per_page(target_groups, cache.page_size, in_windows=True),
        kv_in_fp8=kv_type == FP8,
        has_latent_rows=has_latent_rows(target_groups),
        served_by=target.served_by,
        hidden_size=target.hidden_size,
        images=None if vision is None else _image_sizes(vision, target, dtype, scheduler),
        graph_capture=worker.graph_capture,
        lora=worker.lora,
        bytes_per_snapshot=snapshot_bytes(recurrent, saved_dtype(cache)),
        chunk_bytes=chunk_bytes(recurrent, min(scheduler.step_token_limit, max_model_len)),
    )
    per_state = slot_bytes(recurrent, layout.state_sizes)
    slot_row = SlotTable(0, *_row_sizes(layout, target.vocab_size, torch.device("meta")))  # only the padding slot
    per_slot = slot_row.num_bytes + mask_bytes(layout.mask_width, target.vocab_size) + per_state
    min_slots = AUTO_SLOTS["cpu"][0] if scheduler.max_running == "auto" else scheduler.num_slots
    tables = table_bytes(per_slot, min_slots)
    kv_bytes = kv_bytes_asked(cache, layout.bytes_per_page, tables, layout.bytes_per_snapshot)
    saved = 0 if kv_bytes is None else layout.with_snapshots(kv_bytes).saved_bytes
    layout = replace(layout, bytes_per_slot=per_slot, bytes_per_state=per_state)
    pages = pages_asked(layout.with_slots(min_slots), tables + saved)
    if pages is not None and (scheduler.max_running != "auto" or cache.num_pages is not None):
        layout = layout.with_pages(*pages)
    return EnginePlan(target, dtype, kv_type, speculation, layout, vision)


def _image_sizes(
    vision: VisionConfig, target: ModelConfig, dtype: torch.dtype, scheduler: SchedulerConfig
) -> ImageSizes:
    """Return the sizes of images. Raises ValueError if a step cannot compute an image whose tokens attend to each
    other."""
    sizes, limit = image_sizes(vision, target, dtype), scheduler.step_token_limit
    if sizes.whole and sizes.max_tokens > limit:
        raise ValueError(
            f"scheduler.max_step_tokens={limit}: a step computes all {sizes.max_tokens} tokens of an image, which "
            "attend to each other; raise it, or set model.images=off"
        )
    return sizes


def expert_groups(target: ModelConfig, cache: CacheConfig) -> tuple[LayerGroup, ...]:
    """Return the group that stores routed experts, whose layer numbers follow those of the layers; () if they are not
    recorded. Raises ValueError if they cannot be."""
    if not cache.routed_experts:
        return ()
    routing = target.recorded_routing
    if routing is None:
        raise ValueError(
            f"cache.routed_experts=true: {target.architecture} has no routers of Aerie's own layers; leave it out"
        )
    layers = tuple(range(target.num_layers, 2 * target.num_layers))
    return (LayerGroup(layers, ExpertIds(routing.num_experts, routing.experts_per_token)),)


def longest_window(target: ModelConfig, groups: Sequence[LayerGroup], max_model_len: int) -> int | None:
    """Return the longest window below `max_model_len` in tokens; None without one. Longer windows mask nothing."""
    layers = (layer for group in groups if group.layout.kind == HeadsLayout.kind for layer in group.layers)
    windows = (target.score_rule(layer).window for layer in layers)
    return max((window for window in windows if window is not None and window < max_model_len), default=None)


def split_windows(target: ModelConfig, groups: Sequence[LayerGroup], window: int | None) -> tuple[LayerGroup, ...]:
    """Split the groups so that layers with a window of at most `window` tokens are separate."""
    if window is None:
        return tuple(groups)
    split = []
    for group in groups:
        windows = {layer: target.score_rule(layer).window for layer in group.layers}
        keeping = tuple(layer for layer, own in windows.items() if own is not None and own <= window)
        others = tuple(layer for layer in group.layers if layer not in keeping)
        if group.layout.kind != HeadsLayout.kind or not keeping:
            split.append(group)
            continue
        split += [LayerGroup(others, group.layout)] if others else []
        split.append(LayerGroup(keeping, group.layout, keeps_window=True))
    return tuple(split)


def slot_table(layout: EngineLayout, vocab_size: int, device: torch.device) -> SlotTable:
    """Allocate the slot table of an engine. Each slot's page table covers `max_position` positions."""
    return SlotTable(layout.scheduler.num_slots, *_row_sizes(layout, vocab_size, device))


def _row_sizes(layout: EngineLayout, vocab_size: int, device: torch.device) -> tuple[int, int, torch.device, int, int]:
    """Return the arguments of `SlotTable` after `num_slots`."""
    max_pages = -(-layout.max_position // layout.cache.page_size)
    max_tokens = layout.max_position if layout.shapes.keeps_tokens else 0
    return max_pages, vocab_size, device, max_tokens, 1 if layout.images is None else layout.images.num_axes
