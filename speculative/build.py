"""Builds an engine with or without a draft: the target's (`workers.runner.build`) plus what a draft adds. Used by
`cluster.assembly`, benchmarks and tests, so that all run the same engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from attention.capability import Capability
from attention.config import DraftAttention
from attention.kv_cache.layout import LayerGroup
from attention.metadata import Mode
from attention.registry import Choice, check_choices
from speculative.backends import draft_choices
from speculative.config import SpeculativeConfig
from speculative.decoding import SpeculativeDecoding
from speculative.drafts.checkpoint_files import missing_tables
from speculative.drafts.drafter import DraftRunner, TargetKVRunner
from speculative.drafts.loading import fill_draft, load_draft
from speculative.drafts.method import DraftMethod
from speculative.drafts.registry import read_draft
from speculative.drafts.trimmed_head import head_rows
from speculative.ops.suffix_match import MatchLimits
from speculative.suffix_speculation import SuffixSpeculation
from speculative.tree.shape import TreeShape
from workers.config import RoundShapes, WorkerConfig
from workers.device import resolve_dtype
from workers.distributed.tp_group import SOLO, TPGroup
from workers.models.config import ModelConfig
from workers.models.loading import allocate, fill_target, read_target_config
from workers.models.registry import family_of_config
from workers.models.weight_bytes import META, weight_bytes
from workers.models.weight_formats import weight_formats
from workers.quantization.kv_scheme import kv_dtype
from workers.runner import build
from workers.runner.backends import Backends, ModelShape
from workers.runner.decoding import CuttableStrategy
from workers.runner.deterministic import checked_deterministic
from workers.runner.layout import EngineParts, EnginePlan, NoSpeculation, PhaseDone, Speculation
from workers.runner.layout import plan_engine as plan_of


@dataclass(frozen=True)
class EngineSpec:
    """What to build: the target's ranks, and the draft of an engine that speculates."""

    worker: WorkerConfig
    speculative: SpeculativeConfig | None = None
    draft_attention: DraftAttention = field(default_factory=DraftAttention)


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of weights per GPU rank. A draft's bytes include an embedding or vocabulary head that its checkpoint may
    lack.

    head_rows: rows of the draft's trimmed vocabulary head; None: it is not trimmed.
    head: bytes of that head.
    formats: how the checkpoint stores the target's layers; "" if unquantised.
    """

    target: int
    draft: int
    head_rows: int | None = None
    head: int = 0
    formats: str = ""


@dataclass(frozen=True)
class DraftSpeculation:
    """`workers.runner.layout.Speculation` with a draft.

    draft: checked description of its checkpoint.
    draft_tp: ranks that share it.
    shapes: the tree shapes that it may draft, and non-speculative decoding.
    kv_setting: `cache.draft_dtype`; `cache.dtype` for a draft that reads the target's KV.
    kv_scheme: the target's, for such a draft.
    """

    config: SpeculativeConfig
    attention_names: DraftAttention
    draft: DraftMethod
    draft_tp: int
    shapes: RoundShapes
    kv_setting: str = "auto"
    kv_scheme: str | None = None

    @property
    def captured_layers(self) -> tuple[int, ...]:
        return self.draft.capture

    @property
    def lookahead(self) -> int:
        return self.draft.lookahead

    @property
    def verified_modes(self) -> Mapping[Mode, bool]:
        return {Mode.VERIFY: any(shape.width > 1 and not shape.is_chain for shape in self.shapes.shapes)}

    @property
    def has_synthetic_acceptance(self) -> bool:
        return self.config.synthetic_acceptance_length is not None

    @property
    def _drafts_trees(self) -> bool:
        return any(isinstance(shape, TreeShape) and shape.top_k > 1 for shape in self.shapes.shapes)

    def kv_groups(self, dtype: torch.dtype) -> Sequence[LayerGroup]:
        return () if self.draft.reads_target_kv else self.draft.model.kv_groups(self.draft_tp, self._kv_dtype(dtype))

    def _kv_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return kv_dtype(self.kv_setting, self.kv_scheme, dtype)

    def attention(self, page_size: int, dtype: torch.dtype, device: Capability) -> list[Choice]:
        shape = ModelShape(self.draft.model, self.draft_tp, dtype, page_size, device, self._kv_dtype(dtype))
        masks, window = self._drafts_trees or self.draft.masks_steps, self.config.window or self.draft.window
        return draft_choices(self.attention_names, shape, masks, window)

    def weight_bytes(self, tensor_parallel: int, dtype: torch.dtype, multiplies_fp8: bool) -> int:
        draft, group = self.draft, TPGroup(0, self.draft_tp)
        shared: tuple[str, ...] = ()
        if self.draft_tp == tensor_parallel:
            modules = draft.shared_modules or missing_tables(draft.path)
            shared = tuple(each for each in modules if each != "lm_head" or draft.head_rows is None)
        model = allocate(lambda: draft.build(group, 1, META), draft.weight_names, draft.model.quant, dtype, META)
        return weight_bytes(model, multiplies_fp8, shared)

    def strategy(self, parts: EngineParts, backends: Backends, done: PhaseDone) -> CuttableStrategy:
        worker, device = parts.worker, parts.slots.device
        group = parts.group if self.draft_tp == parts.group.size else SOLO
        model = load_draft(
            self.draft, worker.model, parts.target.model, group, device, max_position=parts.layout.max_position
        )
        done("draft loaded")
        if self.draft.reads_target_kv:
            draft: DraftRunner = TargetKVRunner(model, parts.target.pool, backends, self.config.window)
        else:
            draft = DraftRunner(model, parts.draft_pool, backends, self.config.window)
        synthetic = self.config.synthetic_acceptance_length
        masks = parts.grammars.masks
        shapes = parts.layout.shapes
        config = self.config
        matches = MatchLimits(config.match_min, config.match_max) if config.suffix_tokens else None
        return SpeculativeDecoding(shapes, parts.target, draft, parts.slots, parts.sampler, masks, synthetic, matches)


def plan_weights(spec: EngineSpec, engine: EnginePlan, multiplies_fp8: bool) -> WeightBytes:
    """Return the size of the weights, from the checkpoints' configurations.

    engine: `plan_engine(spec)`.
    multiplies_fp8: whether the GPUs multiply FP8, see `weight_bytes`.
    """
    ranks, target, dtype = spec.worker.tensor_parallel, engine.target, engine.dtype
    group, family = TPGroup(0, ranks), family_of_config(target, f"model {spec.worker.model.path}")
    names = family.weight_names(target)
    model = allocate(lambda: family.model(target, group, 1, META, ()), names, target.quant, dtype, META)
    weights, formats = weight_bytes(model, multiplies_fp8), weight_formats(model)
    draft_bytes = engine.speculation.weight_bytes(ranks, dtype, multiplies_fp8)
    speculation = engine.speculation
    if not isinstance(speculation, DraftSpeculation) or (rows := speculation.draft.head_rows) is None:
        return WeightBytes(weights, draft_bytes, formats=formats)
    head = -(-rows // speculation.draft_tp) * target.hidden_size * dtype.itemsize
    return WeightBytes(weights, draft_bytes, rows, head, formats)


def plan_engine(spec: EngineSpec, device: Capability | None = None) -> EnginePlan:
    """Read and check the checkpoints' configurations. Raises ValueError that names value, rule and remedy. device: see
    `workers.runner.layout.plan_engine`."""
    worker = spec.worker
    target = read_target_config(worker.model, worker.tensor_parallel, worker.expert_parallel)
    return plan_of(spec.worker, target, _speculation(spec, target), device)


def check_weights(spec: EngineSpec, engine: EnginePlan) -> None:
    """Compare the headers of all weight files with what target and draft need; reads no weights. engine:
    `plan_engine(spec)`.

    Raises ValueError naming file, tensor and both shapes.
    """
    source, speculation = spec.worker.model, engine.speculation
    if source.load_format == "dummy":
        return
    target = fill_target(source, engine.target, SOLO, META, 1, speculation.captured_layers)
    if isinstance(speculation, DraftSpeculation):
        fill_draft(speculation.draft, source, target, SOLO, META, max_position=1)


def check_device(spec: EngineSpec, engine: EnginePlan, device: Capability, here: bool) -> None:
    """Raise ValueError for what building a rank on this device would refuse, as far as it shows without the device:
    attention backends, `deterministic`, dtypes, capabilities.

    engine: `plan_engine(spec)`, for any device.
    here: see `attention.registry.check_choices`.
    """
    worker, target = spec.worker, engine.target
    dtype = resolve_dtype(worker.model.dtype, target.dtype, device)
    target.check_device(device, dtype, f"model {worker.model.path}")
    checked_deterministic(worker, target, dtype, device)
    check_choices(build.attention_choices(worker, engine, dtype, device), here)


def _speculation(spec: EngineSpec, target: ModelConfig) -> Speculation:
    config = spec.speculative
    if config is None:
        return NoSpeculation()
    if config.method == "suffix":
        return SuffixSpeculation(config)
    draft = read_draft(config.method, config.path, spec.worker.model.path, target)
    draft = draft.trimmed(head_rows(config.draft_vocab_size, target.vocab_size, spec.worker.model.path))
    most = draft.max_num_steps
    if most is not None and config.num_steps > most:
        raise ValueError(
            f"speculative.num_steps={config.num_steps}: a block of draft {draft.path} has {most} draft tokens; set "
            f"num_steps to at most {most}"
        )
    draft_tp, cache = _draft_tp(config, spec.worker.tensor_parallel), spec.worker.cache
    kept: tuple[str, str | None] = (cache.draft_dtype, None)
    if draft.reads_target_kv:
        _check_reader(spec.worker, config, draft, draft_tp)
        kept = (cache.dtype, target.kv_scheme)
    return DraftSpeculation(config, spec.draft_attention, draft, draft_tp, config.shapes, *kept)


def _check_reader(worker: WorkerConfig, config: SpeculativeConfig, draft: DraftMethod, draft_tp: int) -> None:
    """Raise ValueError for settings without effect on a draft that attends to the target's KV, and for a `draft_tp` at
    which ranks lack that KV."""
    ranks, name = worker.tensor_parallel, f"draft {draft.path}"
    if draft_tp != ranks:
        raise ValueError(
            f"speculative.draft_tp={draft_tp}: {name} attends to the target's KV, which is sharded over all ranks; "
            "leave it out"
        )
    if worker.cache.draft_dtype != "auto":
        raise ValueError(f"cache.draft_dtype={worker.cache.draft_dtype}: {name} has no KV of its own; leave it out")
    if config.draft_vocab_size not in ("auto", 0):
        raise ValueError(
            f"speculative.draft_vocab_size={config.draft_vocab_size}: {name} has a head of its own; leave it out"
        )
    draft.model.check_shards(ranks, name)


def _draft_tp(speculative: SpeculativeConfig, tensor_parallel: int) -> int:
    draft_tp = speculative.draft_tp or tensor_parallel
    if draft_tp not in (1, tensor_parallel):
        raise ValueError(
            f"speculative.draft_tp={draft_tp}: must be 1 (every rank holds the whole draft) or "
            f"tensor_parallel={tensor_parallel}"
        )
    return draft_tp
