"""Builds an engine with or without a draft: the target's (`aerie.workers.runner.build`) plus what a draft adds. Used by
`aerie.cluster.assembly`, benchmarks and tests, so that all run the same engine."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from aerie.attention.config import DraftAttention
from aerie.attention.registry import check_choices
from aerie.kernels.capability import Capability
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.speculative.config import SpeculativeConfig
from aerie.speculative.drafts.loading import fill_draft
from aerie.speculative.drafts.method import DraftMethod
from aerie.speculative.drafts.registry import read_draft
from aerie.speculative.drafts.trimmed_head import head_rows
from aerie.speculative.speculation import DraftSpeculation, SuffixSpeculation
from aerie.speculative.tree_shape import MAX_COLUMNS
from aerie.workers.config import LoraConfig, WorkerConfig
from aerie.workers.device import resolve_dtype
from aerie.workers.distributed.tp_group import SOLO, TPGroup
from aerie.workers.lora.adapter_config import DRAFT_FOLDER, draft_folder
from aerie.workers.lora.adapter_file import AdapterNames, read_layers
from aerie.workers.lora.base_copies import BaseCheckpoint
from aerie.workers.lora.expert_file import ExpertNames
from aerie.workers.lora.experts import adapted_experts, allocate_expert_tables, expert_table_bytes, experts_of
from aerie.workers.lora.layers import adaptable_layers, allocate_tables, checked_layers, padded_rank, table_bytes
from aerie.workers.lora.shared_experts import kept_bytes
from aerie.workers.models.config import ModelConfig
from aerie.workers.models.loading import allocate, allocate_target, fill_target, read_target_config, weight_names
from aerie.workers.models.registry import family_of_config
from aerie.workers.models.weights import META, weight_bytes, weight_formats
from aerie.workers.runner import build
from aerie.workers.runner import local_engine as plain
from aerie.workers.runner.deterministic import checked_deterministic
from aerie.workers.runner.layout import EnginePlan, NoSpeculation, Speculation
from aerie.workers.runner.layout import plan_engine as plan_of
from aerie.workers.runner.local_engine import LocalEngine


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
    adapters: tables of LoRA adapters.
    expert_adapters: those of them for routed experts.
    """

    target: int
    draft: int
    head_rows: int | None = None
    head: int = 0
    formats: str = ""
    adapters: int = 0
    expert_adapters: int = 0


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
    lora = spec.worker.lora
    adapters, of_experts, speculation = 0, 0, engine.speculation
    if lora is not None:
        layers = list(adaptable_layers(model).values())
        if isinstance(speculation, DraftSpeculation) and (draft_spec := adaptable_draft(engine, speculation.draft_tp)):
            layers += draft_spec.layers.values()
        of_experts = expert_table_bytes(adapted_experts(model, lora, f"model {spec.worker.model.path}"), lora)
        adapters = of_experts + table_bytes(layers, lora.max_loras, lora.max_lora_rank)
        weights += kept_bytes(model, GEMMOptions(fp8=multiplies_fp8, packed=True))
    sizes = WeightBytes(weights, draft_bytes, formats=formats, adapters=adapters, expert_adapters=of_experts)
    if not isinstance(speculation, DraftSpeculation) or (rows := speculation.draft.head_rows) is None:
        return sizes
    head = -(-rows // speculation.draft_tp) * target.hidden_size * dtype.itemsize
    return replace(sizes, head_rows=rows, head=head)


def plan_engine(spec: EngineSpec, device: Capability | None = None) -> EnginePlan:
    """Read and check the checkpoints' configurations. Raises ValueError that names value, rule and remedy. device: see
    `aerie.workers.runner.layout.plan_engine`."""
    worker = spec.worker
    target = read_target_config(worker.model, worker.tensor_parallel, worker.expert_parallel)
    return plan_of(spec.worker, target, _speculation(spec, target), device)


def local_engine(spec: EngineSpec, all_graphs: bool = True) -> AbstractContextManager[LocalEngine]:
    """Run an engine while the context is open: one rank in this process, several in a child process each. all_graphs:
    see `aerie.workers.runner.local_engine.local_engine`. Raises what building a rank raises."""
    return plain.local_engine(spec.worker, plan_engine(spec), all_graphs)


def check_weights(spec: EngineSpec, engine: EnginePlan) -> None:
    """Compare the headers of all weight files with what target and draft need; reads no weights. engine:
    `plan_engine(spec)`.

    Raises ValueError naming file, tensor and both shapes.
    """
    source, speculation, lora = spec.worker.model, engine.speculation, spec.worker.lora
    if lora is not None:
        title = f"model {source.path}"
        model = allocate_target(engine.target, SOLO, META, 1, (), engine.dtype, title)
        base = BaseCheckpoint.of(source, weight_names(engine.target, title))
        experts = ExpertNames(adapted_experts(model, lora, title) or experts_of(model), base.names, lora.experts)
        adapted = {"": AdapterNames(checked_layers(model, title), base.names, experts, base)}
        if (draft_spec := adaptable_draft(engine)) is not None:
            adapted[DRAFT_FOLDER] = draft_spec
        _check_adapters(lora, adapted, engine.dtype)
    if source.load_format == "dummy":
        return
    target = fill_target(source, engine.target, SOLO, META, 1, speculation.captured_layers)
    if isinstance(speculation, DraftSpeculation):
        fill_draft(speculation.draft, source, target, SOLO, META, max_position=1)


def adaptable_draft(engine: EnginePlan, ranks: int = 1) -> AdapterNames | None:
    """Return the draft's layers that adapters may change, on "meta"; None without such a draft. ranks: that share
    it."""
    speculation = engine.speculation
    if not isinstance(speculation, DraftSpeculation) or not speculation.draft.takes_adapters:
        return None
    draft, group = speculation.draft, TPGroup(0, ranks)
    model = allocate(lambda: draft.build(group, 1, META), draft.weight_names, draft.model.quant, engine.dtype, META)
    return AdapterNames.of_draft(model, draft.weight_names)


def _check_adapters(lora: LoraConfig, models: Mapping[str, AdapterNames], dtype: torch.dtype) -> None:
    """Read the adapters of a start, and compare them with the models' layers. models: by folder in the adapter's.
    Raises ValueError."""
    rank = padded_rank(lora.max_lora_rank)
    for part, names in models.items():
        tables = {name: allocate_tables(layer.shape, 1, rank, dtype, META) for name, layer in names.layers.items()}
        expert_tables = allocate_expert_tables(names.experts.layers, 1, rank, META)
        for name, folder in lora.modules.items():
            try:
                if not part or draft_folder(folder) is not None:
                    read_layers(Path(folder) / part, names, tables, expert_tables, lora.max_lora_rank)
            except ValueError as error:
                raise ValueError(f"lora.modules.{name}: {error}") from None


def check_device(spec: EngineSpec, engine: EnginePlan, device: Capability, here: bool) -> None:
    """Raise ValueError for what building a rank on this device would refuse, as far as it shows without the device:
    attention backends, `deterministic`, dtypes, capabilities.

    engine: `plan_engine(spec)`, for any device.
    here: see `aerie.attention.registry.check_choices`.
    """
    worker, target = spec.worker, engine.target
    dtype = resolve_dtype(worker.model.dtype, target.dtype, device)
    target.check_device(device, dtype, f"model {worker.model.path}")
    checked_deterministic(worker, target, dtype, device)
    check_choices(build.attention_choices(worker, engine, dtype, device), here)


def _speculation(spec: EngineSpec, target: ModelConfig) -> Speculation:
    """Read the draft's checkpoint, check it against configuration and target, and return the engine's `Speculation`.
    Raises ValueError."""
    config = spec.speculative
    if config is None:
        return NoSpeculation()
    if config.method == "suffix":
        return SuffixSpeculation(config)
    draft = read_draft(config.method, config.path, spec.worker.model.path, target, spec.worker.model.rope_scaling)
    draft = draft.trimmed(head_rows(config.draft_vocab_size, target.vocab_size, spec.worker.model.path))
    max_steps = draft.max_num_steps
    if max_steps is not None and config.num_steps > max_steps:
        raise ValueError(
            f"speculative.num_steps={config.num_steps}: a block of draft {draft.path} has {max_steps} draft tokens; "
            f"set num_steps to at most {max_steps}"
        )
    if config.num_draft_tokens > MAX_COLUMNS:
        _check_wide(spec, config, target)
    draft_tp, cache = _draft_tp(config, spec.worker.tensor_parallel), spec.worker.cache
    kv_formats: tuple[str, str | None] = (cache.draft_dtype, None)
    if draft.reads_target_kv:
        _check_reader(spec.worker, config, draft, draft_tp)
        kv_formats = (cache.dtype, target.kv_scheme)
    return DraftSpeculation(config, spec.draft_attention, draft, draft_tp, config.shapes, *kv_formats)


def _check_wide(spec: EngineSpec, config: SpeculativeConfig, target: ModelConfig) -> None:
    """Raise ValueError for what trees of more than MAX_COLUMNS nodes are not verified with."""
    worker, dtype = spec.worker, torch.float32
    reasons = {
        f"attention.decode={worker.attention.decode}": worker.attention.decode not in ("auto", "triton", "torch"),
        "deterministic": worker.deterministic,
        "a target with recurrent layers": bool(target.state_groups(worker.tensor_parallel, dtype)),
        "a target with latent attention": any(
            group.layout.kind != "heads" for group in target.kv_groups(worker.tensor_parallel, dtype)
        ),
    }
    if reason := next((name for name, applies in reasons.items() if applies), None):
        raise ValueError(
            f"speculative.num_draft_tokens={config.num_draft_tokens}: with {reason} trees have at most {MAX_COLUMNS} "
            f"nodes; set it to {MAX_COLUMNS}"
        )


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
    """Return the number of ranks that share the draft. Raises ValueError."""
    draft_tp = speculative.draft_tp or tensor_parallel
    if draft_tp not in (1, tensor_parallel):
        raise ValueError(
            f"speculative.draft_tp={draft_tp}: must be 1 (every rank holds the whole draft) or "
            f"tensor_parallel={tensor_parallel}"
        )
    return draft_tp
