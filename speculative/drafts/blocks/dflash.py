"""DFlash (arXiv 2602.06036): Qwen3's layers over a block of mask tokens. The target's features, projected, are the
draft's context: they go through each layer's key and value projections only, so no pass over accepted tokens is needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from aerie.kernels.rope.rope_store import Angles
from aerie.speculative.drafts.blocks.config import (
    SCALES,
    BlockForm,
    Scales,
    layers_config,
    read_capture,
    read_form,
    read_scales,
)
from aerie.speculative.drafts.config import check_target, check_width
from aerie.speculative.drafts.drafter import IGNORED_WEIGHTS, layer_names, same_names
from aerie.speculative.drafts.method import DraftMethod, DraftModel
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.decoder_layer import DecoderLayer
from aerie.workers.layers.forward_context import ForwardContext
from aerie.workers.layers.linear import ReplicatedLinear
from aerie.workers.layers.norm import RMSNorm
from aerie.workers.layers.rotary import RotaryTable
from aerie.workers.models.config import ModelConfig
from aerie.workers.models.config_fields import size_of
from aerie.workers.models.llama import LlamaConfig, make_layer, read_config
from aerie.workers.models.name_map import NameMap


@dataclass(frozen=True)
class DFlash(DraftMethod):
    """A DFlash head.

    keys: keys of config.json that only some kinds of heads have.
    form: layout of its blocks.
    scales: factors on the target's embedding and logits.
    """

    name: ClassVar[str] = "dflash"
    lookahead: ClassVar[int] = 0
    keys: ClassVar[frozenset[str]] = SCALES
    model: LlamaConfig
    form: BlockForm
    scales: Scales

    @classmethod
    def read(cls, path: str, raw: Mapping[str, Any], target: ModelConfig) -> Self:
        model = read_config(layers_config(path, raw, cls.keys), f"draft {path}")
        check_target(path, model, size_of(raw, "target_hidden_size", f"draft {path}", model.hidden_size), target)
        check_width(path, model, target, "the projection of a block draft gives the width of the target's layers")
        capture = read_capture(path, raw, target)
        form = read_form(path, raw, model.num_layers, target.vocab_size)
        vocab_size = size_of(raw, "draft_vocab_size", f"draft {path}", model.vocab_size)
        return cls(path, model, vocab_size, capture, form, read_scales(path, raw), **cls.head_fields(path, raw))

    @classmethod
    def head_fields(cls, path: str, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Read the fields that a subclass adds. Raises ValueError."""
        return {}

    def head_names(self) -> dict[str, str]:
        """Return `NameMap` rules of the modules that a subclass adds."""
        return {}

    def head_aliases(self) -> tuple[tuple[str, str], ...]:
        return ()

    def build(self, group: TPGroup, max_position: int, device: torch.device) -> "DFlashModel":
        return DFlashModel(self, group, max_position, device)

    @property
    def max_num_steps(self) -> int | None:
        return self.form.max_depth

    @property
    def masks_steps(self) -> bool:
        return not all(view.causal for view in self.form.views)

    @property
    def window(self) -> int | None:
        return max((w for view in self.form.views if (w := view.window(self.form.size)) is not None), default=None)

    @property
    def weight_names(self) -> NameMap:
        rules = self.head_names() | same_names("hidden_norm") | layer_names("layers.{layer}")
        ignored = (*IGNORED_WEIGHTS, "verifier_lm_head.*", "verifier_norm.*", "confidence_head.*")
        return NameMap(rules, (("model.", ""), *self.head_aliases()), ignored)


@dataclass(frozen=True)
class RowCandidates:
    """The candidate tokens of each block row, for heads that propose no others. The same on every rank.

    scores: [B, depths, n] float32 log-probabilities that ignore the previous token, up to a constant per row.
    ids: [B, depths, n] int64 draft ids.
    projected: [B, depths, rank] projections of the rows' states; None if the head has none.
    """

    scores: Tensor
    ids: Tensor
    projected: Tensor | None = None


@dataclass(frozen=True)
class Block:
    """The drafted blocks of a batch, rows by depth.

    states: [B, depths, hidden] after the final norm.
    logits: [B, depths, shard size] over the draft's vocabulary.
    candidates: None if the head proposes any token.
    """

    states: Tensor
    logits: Tensor
    candidates: RowCandidates | None = None


class DFlashModel(DraftModel):
    """Row k of a block is at position anchor + k. `keep` writes the context's KV.

    conditional: whether a row's logits depend on the previous token.
    num_candidates: tokens that the head proposes per row; 0: all.
    """

    drafts_blocks: ClassVar[bool] = True
    conditional: ClassVar[bool] = False
    num_candidates: int = 0

    def __init__(self, method: DFlash, group: TPGroup, max_position: int, device: torch.device) -> None:
        super().__init__(method, group)
        model = method.model
        self.form = method.form
        self.scales = method.scales
        self.rotary = RotaryTable(model.rope, model.head_dim, max_position, device)
        self.fc = ReplicatedLinear(len(method.capture) * model.hidden_size, model.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(model.hidden_size, model.rms_eps)
        self.layers = nn.ModuleList(make_layer(model, i, group) for i in range(model.num_layers))
        self.norm = RMSNorm(model.hidden_size, model.rms_eps)

    def keep(self, ids: Tensor, features: Tensor, context: ForwardContext) -> None:
        projected = self.hidden_norm(self.fc(features))
        angles = self.rotary.at(context.positions)
        for layer in self.layers:
            layer.self_attn.keep(projected, angles, context)  # type: ignore[union-attr, operator]

    def step(self, ids: Tensor, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Run `block` with the same context for all layers; `hidden` is unused."""
        return self.block(ids.unsqueeze(0), (context,) * self.num_layers)

    def block(self, ids: Tensor, contexts: Sequence[ForwardContext]) -> Tensor:
        """Run blocks of R rows; return [B * R, hidden] after the final norm.

        ids: [B, R] int64 anchors and mask tokens.
        contexts: a context per layer, because layers may see different tokens.
        """
        layers: list[DecoderLayer] = list(self.layers)  # type: ignore[arg-type]
        angles, rows = self.rotary.at(contexts[0].positions), ids.shape[1]
        residual, added = self.embed_tokens(ids.flatten()), None
        if self.scales.embedding != 1.0:
            residual = residual * self.scales.embedding
        for layer, context in zip(layers, contexts, strict=True):
            if added is None:
                normed: Tensor = layer.input_layernorm(residual)
            else:
                normed, residual = layer.input_layernorm.add(added, residual, self.group)
            added, residual = self.run_layer(layer, normed, residual, angles, context, rows)
        assert added is not None, "a draft has layers"
        state: Tensor = self.norm.add(added, residual, self.group)[0]
        return state

    def run_layer(
        self,
        layer: DecoderLayer,
        normed: Tensor,
        residual: Tensor,
        angles: Angles,
        context: ForwardContext,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        """Run a layer on blocks of `rows` rows, as `DecoderLayer.forward`."""
        out: tuple[Tensor, Tensor] = layer(normed, residual, angles, context)
        return out

    def candidates_of(self, states: Tensor, logits: Tensor, noisy: Tensor | None = None) -> RowCandidates | None:
        """Return `Block.candidates` of its states and logits. noisy: logits with the target's noise, in a batch with
        random requests."""
        return None

    def candidates_after(
        self, block: Block, row: int, previous: Tensor, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return scores and draft ids, [B * k, num_candidates], of the candidates of `row` after previous [B, k] int64
        target ids. state: of the paths to them (`path_state`)."""
        raise NotImplementedError

    def after(self, block: Block, row: int, previous: Tensor, state: Tensor | None = None) -> Tensor:
        """Return the logits of a row after each of `previous`: [B * k, shard size], newly allocated.

        row: row of the block, from 0.
        previous: [B, k] int64 target ids.
        state: [B * k, any] states of the paths to them, from `path_state`.
        """
        return block.logits[:, row].repeat_interleave(previous.shape[1], dim=0)

    def path_state(self, state: Tensor | None, tokens: Tensor) -> Tensor | None:
        """Return the state [n, any] of paths that end with tokens [n] int64, for heads that read whole paths; None for
        others. state: [n, any] of the paths before them; None if the tokens are the anchors."""
        return None

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head.scaled(hidden, 1 / self.scales.logits, self.scales.soft_cap)
