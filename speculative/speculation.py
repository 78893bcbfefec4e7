"""The part of an engine's plan that speculates: with a draft, or with drafts copied from the text alone. Used by
`aerie.speculative.build`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from aerie.attention.config import DraftAttention
from aerie.attention.kv_cache.layout import LayerGroup
from aerie.attention.registry import Choice
from aerie.kernels.capability import Capability
from aerie.kernels.drafting.suffix_match import MatchLimits
from aerie.kernels.kv.batches import Mode
from aerie.speculative.config import SpeculativeConfig
from aerie.speculative.decoding import SpeculativeDecoding
from aerie.speculative.drafts.checkpoint_files import missing_tables
from aerie.speculative.drafts.drafter import DraftRunner, TargetKVRunner
from aerie.speculative.drafts.loading import load_draft, running_draft
from aerie.speculative.drafts.method import DraftMethod
from aerie.speculative.tree_shape import TreeShape
from aerie.workers.config import RoundShapes
from aerie.workers.distributed.tp_group import SOLO, TPGroup
from aerie.workers.models.loading import allocate
from aerie.workers.models.weights import META, weight_bytes
from aerie.workers.quantization.kv_scheme import kv_dtype
from aerie.workers.runner.backends import Backends, ModelShape
from aerie.workers.runner.decoding import CuttableStrategy
from aerie.workers.runner.layout import EngineParts, PhaseDone, WithoutDraftModel


@dataclass(frozen=True)
class DraftSpeculation:
    """`aerie.workers.runner.layout.Speculation` with a draft.

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
            shared = tuple(module for module in modules if module != "lm_head" or draft.head_rows is None)
        model = allocate(lambda: draft.build(group, 1, META), draft.weight_names, draft.model.quant, dtype, META)
        return weight_bytes(model, multiplies_fp8, shared)

    def strategy(self, parts: EngineParts, backends: Backends, done: PhaseDone) -> CuttableStrategy:
        worker, device = parts.worker, parts.slots.device
        group = parts.group if self.draft_tp == parts.group.size else SOLO
        model = load_draft(
            self.draft, worker.model, parts.target.model, group, device, max_position=parts.layout.max_position
        )
        done("draft loaded")
        parts.models["draft"] = running_draft(
            model, self.draft, worker.model, parts.target.model, parts.layout.max_position
        )
        if self.draft.reads_target_kv:
            draft: DraftRunner = TargetKVRunner(model, parts.target.pool, backends, self.config.window)
        else:
            rows = None
            if parts.adapters is not None and self.draft.takes_adapters:
                rows = parts.adapters.adapt_draft(model, self.draft.weight_names)
            draft = DraftRunner(model, parts.draft_pool, backends, self.config.window, rows)
        return _decoding(self.config, parts, draft)


@dataclass(frozen=True)
class SuffixSpeculation(WithoutDraftModel):
    """`aerie.workers.runner.layout.Speculation` of `method: suffix`: it has no weights and no KV, and reads no layer of
    the target."""

    config: SpeculativeConfig

    @property
    def shapes(self) -> RoundShapes:
        return self.config.shapes

    @property
    def verified_modes(self) -> Mapping[Mode, bool]:
        return {Mode.VERIFY: False}

    @property
    def has_synthetic_acceptance(self) -> bool:
        return self.config.synthetic_acceptance_length is not None

    def strategy(self, parts: EngineParts, backends: Backends, done: PhaseDone) -> CuttableStrategy:
        return _decoding(self.config, parts, None)


def _decoding(config: SpeculativeConfig, parts: EngineParts, draft: DraftRunner | None) -> SpeculativeDecoding:
    """Build the decoding strategy. draft: None if drafts are only copied from the requests' own text."""
    copies = draft is None or config.suffix_tokens > 0
    return SpeculativeDecoding(
        parts.layout.shapes,
        parts.target,
        draft=draft,
        slots=parts.slots,
        sampler=parts.sampler,
        masks=parts.grammars.masks,
        synthetic_acceptance_length=config.synthetic_acceptance_length,
        matches=MatchLimits(config.match_min, config.match_max) if copies else None,
    )


def draft_choices(names: DraftAttention, shape: ModelShape, tree: bool, window: int | None = None) -> list[Choice]:
    """Return the configured backends of the draft. tree: whether drafting branches. window: see `SpeculativeConfig`."""
    return [
        Choice("draft_attention.prefill", names.prefill, shape.use(Mode.PREFILL, window=window)),
        Choice("draft_attention.extend", names.extend, shape.use(Mode.DRAFT_EXTEND, window=window)),
        Choice("draft_attention.decode", names.decode, shape.use(Mode.DRAFT_DECODE, tree, window)),
    ]
