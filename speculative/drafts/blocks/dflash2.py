"""DFlash2 (z-lab): DFlash with convolutions over the rows of a block, around attention and MLP, and a selector, which
scores a row's best tokens given the previous token."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from aerie.kernels.drafting.block_head import convolve_blocks, score_candidates
from aerie.kernels.rope.rope_store import Angles
from aerie.speculative.drafts.blocks.config import SCALES, all_keys
from aerie.speculative.drafts.blocks.dflash import Block, DFlash, DFlashModel, RowCandidates
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.decoder_layer import DecoderLayer
from aerie.workers.layers.forward_context import ForwardContext
from aerie.workers.layers.linear import ReplicatedLinear
from aerie.workers.layers.weighted import WeightedModule, WeightKey, check_plain, check_shape
from aerie.workers.models.config_fields import section_of, size_of
from aerie.workers.models.llama import LlamaConfig, make_attention, make_mlp

_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_DEFAULTS = (2, 16, 256, 16)


@dataclass(frozen=True)
class DFlash2(DFlash):
    """A DFlash2 head.

    taps: number of rows that a convolution reads, the last of which is the row itself.
    group_size: channels that share a dynamic kernel.
    rank: rank of the selector.
    candidates: number of tokens per row that the selector scores.
    """

    name: ClassVar[str] = "dflash2"
    keys: ClassVar[frozenset[str]] = SCALES | frozenset(_KEYS)
    taps: int
    group_size: int
    rank: int
    candidates: int

    @classmethod
    def head_fields(cls, path: str, raw: Mapping[str, Any]) -> dict[str, Any]:
        source = f"draft {path}"
        keys = all_keys(path, raw)
        taps, group_size, rank, candidates = (
            size_of(keys, key, source, default) for key, default in zip(_KEYS, _DEFAULTS, strict=True)
        )
        layers = section_of(raw, "transformer_layer_config", source) or raw
        hidden, vocab = size_of(layers, "hidden_size", source), size_of(layers, "vocab_size", source)
        if hidden % group_size:
            raise ValueError(f"{source}: conv_group_size={group_size}: must divide hidden_size={hidden}")
        if size_of(raw, "draft_vocab_size", source, vocab) != vocab or candidates > vocab:
            raise ValueError(
                f"{source}: draft_vocab_size={raw.get('draft_vocab_size')}, selector_top_k={candidates}: a DFlash2 "
                f"head proposes from the target's whole vocabulary of {vocab}; use a head that does"
            )
        return {"taps": taps, "group_size": group_size, "rank": rank, "candidates": candidates}

    def build(self, group: TPGroup, max_position: int, device: torch.device) -> "DFlash2Model":
        return DFlash2Model(self, group, max_position, device)

    def head_names(self) -> dict[str, str]:
        return {
            "layers.{layer}.{conv}.projection": "layers.{layer}.{conv}.kernel_projection",
            "layers.{layer}.{conv}.base": "layers.{layer}.{conv}",
            "selector.projection": "candidate_selector.hidden_projection",
            "selector.codebooks": "candidate_selector",
        }

    def head_aliases(self) -> tuple[tuple[str, str], ...]:
        names = (f"candidate_selector.{name}_codebook" for name in ("predecessor", "successor"))
        return tuple((f"{name}.weight", name) for name in names)


class PlainTensors(WeightedModule):
    """Unsharded parameters whose names in the checkpoint lack ".weight"."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape), requires_grad=False))

    def weight_keys(self) -> tuple[WeightKey, ...]:
        return tuple(WeightKey(name) for name, _ in self.named_parameters())

    def load(self, key: WeightKey, full: Tensor) -> None:
        parameter = self.get_parameter(key.kind)
        check_plain(full)
        check_shape(full, parameter.shape)
        parameter.data.copy_(full)

    def fill_dummy(self, generator: torch.Generator) -> None:
        for parameter in self.parameters():
            parameter.data.normal_(0.0, 0.02, generator=generator)


class BlockConvolution(nn.Module):
    """Causal convolutions over the rows of a block, one before a sublayer and one after. Kernels are a learnt part per
    channel and a part per group of channels, which depends on the sublayer's input."""

    def __init__(self, hidden_size: int, taps: int, group_size: int) -> None:
        super().__init__()
        self.taps, self.groups = taps, hidden_size // group_size
        self.base = PlainTensors({"base_kernel": (2, taps, hidden_size)})
        self.projection = ReplicatedLinear(hidden_size, 2 * taps * self.groups, bias=False)

    def kernels(self, x: Tensor) -> Tensor:
        """Return the dynamic parts of both kernels, [rows, 2, taps, groups], of x [rows, hidden]."""
        dynamic: Tensor = self.projection(x).view(x.shape[0], 2, self.taps, self.groups)
        return dynamic

    def convolve(self, x: Tensor, dynamic: Tensor, index: int, rows: int) -> Tensor:
        """Convolve x [B * rows, hidden] with kernel 0 or 1. dynamic: the result of `kernels`. The result is linear in
        x, so ranks may convolve their partial sums."""
        base = self.base.get_parameter("base_kernel")[index]
        return convolve_blocks(x.contiguous(), base, dynamic[:, index], rows)


class DFlash2Layer(DecoderLayer):
    """Convolutions around attention and MLP."""

    def __init__(self, method: DFlash2, layer: int, group: TPGroup) -> None:
        model = method.model
        attention = make_attention(model, layer, group, model.hidden_size)
        super().__init__(model.hidden_size, model.rms_eps, attention, make_mlp(model, group), group)
        sizes = model.hidden_size, method.taps, method.group_size
        self.attention_conv, self.mlp_conv = BlockConvolution(*sizes), BlockConvolution(*sizes)

    def run(
        self, normed: Tensor, residual: Tensor, angles: Angles, context: ForwardContext, rows: int
    ) -> tuple[Tensor, Tensor]:
        """`DecoderLayer.forward` for blocks of `rows` rows."""
        dynamic = self.attention_conv.kernels(normed)
        x = self.attention_conv.convolve(normed, dynamic, 0, rows)
        attended = self.attention_conv.convolve(self.self_attn.partial(x, angles, context), dynamic, 1, rows)
        normed, residual = self.post_attention_layernorm.add(attended, residual, self.group)
        dynamic = self.mlp_conv.kernels(normed)
        x = self.mlp_conv.convolve(normed, dynamic, 0, rows)
        return self.mlp_conv.convolve(self.mlp.partial(x), dynamic, 1, rows), residual


class Selector(nn.Module):
    """Scores a token given the previous one: its logit + <predecessor[previous] * projection(state),
    successor[token]>."""

    def __init__(self, model: LlamaConfig, rank: int) -> None:
        super().__init__()
        shape = (model.vocab_size, rank)
        self.codebooks = PlainTensors({"predecessor_codebook": shape, "successor_codebook": shape})
        self.projection = ReplicatedLinear(model.hidden_size, rank, bias=False)

    def project(self, states: Tensor) -> Tensor:
        """Return [..., rank] of states [..., hidden]."""
        projected: Tensor = self.projection(states.flatten(0, -2)).unflatten(0, states.shape[:-1])
        return projected

    def forward(self, candidates: RowCandidates, row: int, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores of a row's candidates after each node, and their ids: [B * k, n] float32 and int64.

        row: row of the block. previous: [B, k] int64 token of each node.
        """
        before, after = (self.codebooks.get_parameter(f"{name}_codebook") for name in ("predecessor", "successor"))
        return score_candidates(candidates.scores, candidates.ids, candidates.projected, row, previous, before, after)


class DFlash2Model(DFlashModel):
    """Tokens outside a row's candidates have a logit of minus infinity."""

    conditional: ClassVar[bool] = True

    def __init__(self, method: DFlash2, group: TPGroup, max_position: int, device: torch.device) -> None:
        super().__init__(method, group, max_position, device)
        self.layers = nn.ModuleList(DFlash2Layer(method, i, group) for i in range(method.model.num_layers))
        self.selector = Selector(method.model, method.rank)
        self.num_candidates = method.candidates

    def run_layer(
        self,
        layer: DecoderLayer,
        normed: Tensor,
        residual: Tensor,
        angles: Angles,
        context: ForwardContext,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(layer, DFlash2Layer)
        return layer.run(normed, residual, angles, context, rows)

    def candidates_of(self, states: Tensor, logits: Tensor, noisy: Tensor | None = None) -> RowCandidates:
        scores, ids = self.lm_head.shard.topk_log_softmax(logits.flatten(0, 1), self.num_candidates)
        shape = (*logits.shape[:2], -1)
        return RowCandidates(scores.view(shape), ids.view(shape), self.selector.project(states))

    def candidates_after(
        self, block: Block, row: int, previous: Tensor, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        assert block.candidates is not None
        scored: tuple[Tensor, Tensor] = self.selector(block.candidates, row, previous)
        return scored

    def after(self, block: Block, row: int, previous: Tensor, state: Tensor | None = None) -> Tensor:
        shard = self.lm_head.shard
        scores, ids = self.candidates_after(block, row, previous)
        local = ids - shard.first
        mine = (local >= 0) & (local < shard.size)
        logits = block.logits.new_full((scores.shape[0], shard.size), float("-inf"))
        scores = torch.where(mine, scores.to(logits.dtype), float("-inf"))
        return logits.scatter_reduce_(1, torch.where(mine, local, 0), scores, "amax")
