"""EAGLE-3 (arXiv 2503.01840) and EAGLE-3.1 (2605.09992) heads: they read captured layers of the target, and have a
vocabulary of their own. The recurrent state is taken before the final norm. `eagle3_config.HeadFlags` lists the
variants."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from aerie.kernels.norm.norm import head_input
from aerie.kernels.rope.rope_store import Angles
from aerie.speculative.drafts.checkpoint_files import tensor_names
from aerie.speculative.drafts.config import check_target, check_width
from aerie.speculative.drafts.drafter import DraftLayer, joined_input, projected
from aerie.speculative.drafts.eagle3_config import (
    HeadFlags,
    captured_layers,
    count_layers,
    layers_config,
    read_flags,
    reads_captured_layers,
    weight_names,
)
from aerie.speculative.drafts.method import DraftMethod, DraftModel
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.decoder_layer import DecoderLayer
from aerie.workers.layers.forward_context import ForwardContext
from aerie.workers.layers.linear import ReplicatedLinear
from aerie.workers.layers.norm import RMSNorm
from aerie.workers.layers.rotary import RotaryTable
from aerie.workers.layers.vocab import VocabEmbedding
from aerie.workers.models.config import ModelConfig
from aerie.workers.models.config_fields import MAX_LAYERS, flag_of, size_of
from aerie.workers.models.llama import LlamaConfig, make_layer, read_config
from aerie.workers.models.name_map import NameMap


@dataclass(frozen=True)
class Eagle3(DraftMethod):
    """An EAGLE-3 head.

    capture: the target's layers whose input it reads; empty if it reads the final hidden state, without a projection.
    projection_bias: whether the projection of captured layers has a bias; published heads have none.
    target_hidden_size: width of a captured layer; the head's own is `model.hidden_size`.
    reads_last_layer: whether it reads the target's last layer, normalised or, if captured, not (NVIDIA's third gpt-oss
        head).
    """

    name: ClassVar[str] = "eagle3"
    takes_adapters: ClassVar[bool] = True
    model: LlamaConfig
    projection_bias: bool
    target_hidden_size: int
    reads_last_layer: bool = False
    flags: HeadFlags = field(default_factory=HeadFlags)

    @classmethod
    def read(cls, path: str, raw: Mapping[str, Any], target: ModelConfig) -> Self:
        layers = layers_config(path, raw)
        layers["num_hidden_layers"] = size_of(layers, "num_hidden_layers", f"draft {path}", 1, max_value=MAX_LAYERS)
        # SafeAILab's Vicuna head states its target's num_hidden_layers, but has one layer
        if layers["num_hidden_layers"] > 1 and count_layers(tensor_names(path)) == 1:
            layers["num_hidden_layers"] = 1
        model = read_config(layers, f"draft {path}")
        check_target(path, model, size_of(raw, "target_hidden_size", f"draft {path}", model.hidden_size), target)
        flags = read_flags(path, raw)
        capture: tuple[int, ...] = ()
        if reads_captured_layers(raw):
            capture = captured_layers(path, raw, target.num_layers)
        else:
            check_width(path, model, target, "use_aux_hidden_state=false means that it reads the target's hidden state")
            if flags.norm_before_fc or flags.fc_norm:
                raise ValueError(
                    f"draft {path}: norm_before_fc and fc_norm apply to captured layers, but "
                    "use_aux_hidden_state=false says that it reads none; correct the draft's config"
                )
        vocab_size = size_of(raw, "draft_vocab_size", f"draft {path}", model.vocab_size)
        return cls(
            path,
            model,
            vocab_size,
            capture,
            flag_of(raw, "bias", f"draft {path}"),
            target.hidden_size,
            not capture or target.num_layers in capture,
            flags,
        )

    def build(self, group: TPGroup, max_position: int, device: torch.device) -> "Eagle3Model":
        return Eagle3Model(self, group, max_position, device)

    @property
    def weight_names(self) -> NameMap:
        return weight_names(self.model.num_layers)


class Eagle3Layer(DraftLayer):
    """The first layer. Its attention reads the concatenated norms of embedding and feature."""

    def __init__(self, model: LlamaConfig, group: TPGroup) -> None:
        super().__init__(model, group, 2 * model.hidden_size)
        self.input_layernorm = RMSNorm(model.hidden_size, model.rms_eps)
        self.hidden_norm = RMSNorm(model.hidden_size, model.rms_eps)

    def input(self, ids: Tensor, hidden: Tensor, embedding: VocabEmbedding) -> Tensor:
        """Return the concatenated norms of the embeddings of ids [rows] int64 and of hidden: [rows, 2 *
        hidden_size]."""
        has_table = embedding.weight.shape[0] > 0  # else a tied head's GEMM has it
        if embedding.shard.group.size == 1 and has_table:
            norms = self.input_layernorm, self.hidden_norm
            return head_input(ids, embedding.weight, hidden, norms[0].weight, norms[1].weight, norms[0].eps)
        return joined_input(self.input_layernorm(embedding(ids)), self.hidden_norm(hidden))


class Eagle3Model(DraftModel):
    """An EAGLE-3 head on one rank. In the next draft step its recurrent state takes the place of the projected
    features."""

    def __init__(self, method: Eagle3, group: TPGroup, max_position: int, device: torch.device) -> None:
        super().__init__(method, group)
        model, flags, width = method.model, method.flags, len(method.capture) * method.target_hidden_size
        self.flags, self.reads_last_layer = flags, method.reads_last_layer
        self.rotary = RotaryTable(model.rope, model.head_dim, max_position, device)
        self.fc = ReplicatedLinear(width, model.hidden_size, method.projection_bias) if width else None
        self.input_norm = RMSNorm(width, model.rms_eps) if flags.norm_before_fc else None
        per_layer = method.capture if flags.fc_norm else ()
        self.fc_norm = nn.ModuleList([RMSNorm(method.target_hidden_size, model.rms_eps) for _ in per_layer])
        self.midlayer = Eagle3Layer(model, group)
        self.layers = nn.ModuleDict({str(i): make_layer(model, i, group) for i in range(1, model.num_layers)})
        self.norm = RMSNorm(model.hidden_size, model.rms_eps)

    def extend(self, ids: Tensor, features: Tensor, context: ForwardContext) -> Tensor:
        return self.step(ids, self.project(features), context)

    def project(self, features: Tensor) -> Tensor:
        """Project captured layers [rows, F] to [rows, hidden_size]. NVIDIA's Llama-4 head has no projection, and reads
        the target's final state."""
        if self.fc is None:
            return features.clone()  # the layer adds to its residual stream in place
        return projected(features, self.input_norm, self.fc_norm, self.fc)

    def keep(self, ids: Tensor, features: Tensor, context: ForwardContext) -> None:
        x, residual = self._input(ids, self.project(features))
        angles = self.rotary.at(context.positions)
        if not self.layers:
            self.midlayer.self_attn.keep(x, angles, context)
            return
        x, _ = self._before_last(self.midlayer(x, residual, angles, context), angles, context)
        self._last.self_attn.keep(x, angles, context)

    def step(self, ids: Tensor, hidden: Tensor, context: ForwardContext) -> Tensor:
        x, residual = self._input(ids, hidden)
        angles = self.rotary.at(context.positions)
        out: Tensor = self.midlayer(x, residual, angles, context)
        if self.layers:
            normed, residual = self._before_last(out, angles, context)
            added, residual = self._last(normed, residual, angles, context.last or context)
            out = residual + self.group.all_reduce(added)
        return self.norm(out) if self.flags.norm_output else out

    @property
    def _last(self) -> DecoderLayer:
        """Return the last of several layers."""
        return self.layers[str(self.num_layers - 1)]  # type: ignore[return-value]

    def _input(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the first layer's attention, and the residual stream."""
        both = self.midlayer.input(ids, hidden, self.embed_tokens)
        return both, both[:, both.shape[1] // 2 :] if self.flags.norm_before_residual else hidden

    def _before_last(self, residual: Tensor, angles: Angles, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """Run the layers between the first and the last on all rows. Return the normalised input of the last attention,
        and the residual stream."""
        layers: list[DecoderLayer] = list(self.layers.values())  # type: ignore[arg-type]
        normed: Tensor = layers[0].input_layernorm(residual)
        for layer, following in pairwise(layers):
            added, residual = layer(normed, residual, angles, context)
            normed, residual = following.input_layernorm.add(added, residual, self.group)
        return normed, residual

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden if self.flags.norm_output else self.norm(hidden))
        return logits
