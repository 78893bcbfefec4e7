"""EAGLE-3 heads (arXiv 2503.01840): three captured layers of the target, a vocabulary of their own, and a recurrent
state from before the final norm."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from speculative.draft_models.config import check_fit, draft_architecture, read_layer
from speculative.draft_models.layers import IGNORED_WEIGHTS, DraftLayer, layer_names
from speculative.draft_models.method import DraftMethod, DraftModel
from workers.distributed.tp_group import TPGroup
from workers.layers.forward_context import ForwardContext
from workers.layers.linear import ReplicatedLinear
from workers.layers.norm import RMSNorm
from workers.layers.rotary import RotaryTable
from workers.layers.vocab import VocabEmbedding
from workers.models.config import ModelConfig
from workers.models.decoder import DecoderOutput
from workers.models.llama import LlamaConfig
from workers.models.name_map import NameMap


@dataclass(frozen=True)
class Eagle3(DraftMethod):
    """projection_bias: whether the projection of the captured layers has a bias; published ones have none."""

    name: ClassVar[str] = "eagle3"
    model: LlamaConfig
    projection_bias: bool

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        return "eagle3" in draft_architecture(raw).lower() or "draft_vocab_size" in raw

    @classmethod
    def read(cls, path: str, raw: Mapping[str, Any], target: ModelConfig) -> Self:
        model = read_layer(path, raw)
        check_fit(path, model, raw, target)
        vocab_size = int(raw.get("draft_vocab_size") or raw["vocab_size"])
        return cls(path, model, vocab_size, _captured_layers(path, raw, target), bool(raw.get("bias", False)))

    def build(self, group: TPGroup, max_position: int, device: torch.device) -> "Eagle3Model":
        return Eagle3Model(self, group, max_position, device)

    @property
    def weight_names(self) -> NameMap:
        """Some published heads call their layer layers.0."""
        return NameMap(layer_names("midlayer"), (("model.", ""), ("layers.0.", "midlayer.")), IGNORED_WEIGHTS)


class Eagle3Layer(DraftLayer):
    """Its attention reads the normalised embedding beside the normalised feature."""

    def __init__(self, model: LlamaConfig, group: TPGroup) -> None:
        super().__init__(model, group, 2 * model.hidden_size)
        self.input_layernorm = RMSNorm(model.hidden_size, model.rms_eps)
        self.hidden_norm = RMSNorm(model.hidden_size, model.rms_eps)

    def input(self, ids: Tensor, hidden: Tensor, embedding: VocabEmbedding) -> Tensor:
        """[rows, 2 * hidden_size]: the norms of the embeddings of ids [rows] int64 and of hidden, side by side."""
        if hidden.is_cuda and embedding.shard.group.size == 1:
            from speculative.kernels.head_input import head_input

            norms = self.input_layernorm, self.hidden_norm
            return head_input(ids, embedding.weight, hidden, norms[0].weight, norms[1].weight, norms[0].eps)
        return torch.cat((self.input_layernorm(embedding(ids)), self.hidden_norm(hidden)), dim=-1)


class Eagle3Model(DraftModel):
    """Its recurrent state takes the place of the projected features in the next step."""

    def __init__(self, method: Eagle3, group: TPGroup, max_position: int, device: torch.device) -> None:
        super().__init__(method, group)
        self.rotary = RotaryTable(method.model.rope, method.model.head_dim, max_position, device)
        model = method.model
        self.fc = ReplicatedLinear(len(method.capture) * model.hidden_size, model.hidden_size, method.projection_bias)
        self.midlayer = Eagle3Layer(model, group)
        self.norm = RMSNorm(model.hidden_size, model.rms_eps)

    def features(self, output: DecoderOutput) -> Tensor:
        assert output.captured is not None
        return output.captured

    def extend(self, ids: Tensor, features: Tensor, context: ForwardContext) -> Tensor:
        return self.step(ids, self.fc(features), context)

    def step(self, ids: Tensor, hidden: Tensor, context: ForwardContext) -> Tensor:
        both = self.midlayer.input(ids, hidden, self.embed_tokens)
        out: Tensor = self.midlayer(both, hidden, self.rotary.at(context.positions), context)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits


def _captured_layers(path: str, raw: Mapping[str, Any], target: ModelConfig) -> tuple[int, ...]:
    """Layers whose input is captured. Explicit ids name layers whose output is meant, hence + 1."""
    given = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    given = given or raw.get("eagle_aux_hidden_state_layer_ids")
    layers = target.num_layers
    capture = tuple(int(i) + 1 for i in given) if given else (2, layers // 2, layers - 3)
    if len(capture) != 3 or len(set(capture)) != 3 or not all(0 <= i < layers for i in capture):
        raise ValueError(
            f"draft {path}: captures the input of layers {capture}, which the target of {layers} layers does "
            "not have three of; set eagle_config.eagle_aux_hidden_state_layer_ids in the draft's config"
        )
    return capture
