"""Gemma 4's assistant: a small draft without its own KV. Its layers have queries only, and attend to the KV of the
target's last layer of the same kind. Every draft step attends only to the committed tokens, with the query position of
the newest one. So earlier drafted tokens influence a step only through its recurrent state.

Checkpoints: `google/gemma-4-*-it-assistant`. Layout and formula: transformers 5, `models/gemma4_assistant`, and
`SinglePositionMultiTokenCandidateGenerator`."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from aerie.kernels.capability import Capability
from aerie.speculative.drafts.config import check_target
from aerie.speculative.drafts.method import DraftMethod, DraftModel
from aerie.speculative.drafts.recognition import ASSISTANTS, draft_architecture
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.decoder_layer import DecoderLayer
from aerie.workers.layers.forward_context import ForwardContext
from aerie.workers.layers.linear import ReplicatedLinear
from aerie.workers.layers.norm import FullPrecisionRMSNorm
from aerie.workers.layers.rotary import RotaryTable
from aerie.workers.layers.vocab import VocabShard
from aerie.workers.layers.weighted import WeightedModule, WeightKey, WrongTensorError, check_shape
from aerie.workers.models.config import ModelConfig
from aerie.workers.models.config_fields import flag_of, section_of, size_of
from aerie.workers.models.decoder import in_default_dtype
from aerie.workers.models.gemma.gemma4 import make_layer, weight_names
from aerie.workers.models.gemma.gemma4_config import Gemma4Config, Heads, read_config
from aerie.workers.models.mistral import SLIDING
from aerie.workers.models.name_map import NameMap


@dataclass(frozen=True, kw_only=True)
class AssistantConfig(Gemma4Config):
    """Configuration of an assistant's layers.

    kv_layers: for each layer, the target's layer whose KV it attends to.
    windows: one less than the target's, which include the row's own token.
    """

    kv_layers: tuple[int, ...]

    def kv_layer(self, layer: int) -> int | None:
        return self.kv_layers[layer]


@dataclass(frozen=True)
class VocabClusters:
    """Sizes of a vocabulary head that computes only the logits of the best clusters of tokens.

    count: number of clusters, all of equal size.
    best: number of clusters that are used.
    """

    count: int
    best: int


@dataclass(frozen=True)
class Gemma4Assistant(DraftMethod):
    """The draft method of Gemma 4's assistants.

    backbone: hidden_size of the target.
    clusters: None if all logits are used.
    """

    name: ClassVar[str] = "mtp"
    lookahead: ClassVar[int] = 0
    reads_target_kv: ClassVar[bool] = True
    shared_modules: ClassVar[tuple[str, ...]] = ("embed_tokens",)

    model: AssistantConfig
    backbone: int
    clusters: VocabClusters | None

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        return super().recognises(raw) and draft_architecture(raw) in ASSISTANTS

    @classmethod
    def read(cls, path: str, raw: Mapping[str, Any], target: ModelConfig) -> Self:
        source = f"draft {path}"
        if not isinstance(target, Gemma4Config):
            raise ValueError(
                f"{source}: is an assistant of Gemma 4, the target is {target.architecture}; use a head that was "
                "trained for this target"
            )
        own = _read_layers(raw, source)
        backbone = size_of(raw, "backbone_hidden_size", source, 1536)
        check_target(path, own, backbone, target)
        kv_layers = tuple(target.last_kv_layer(kind) for kind in own.kinds)
        heads, windows = zip(*(_fitted(own, i, target, kv, source) for i, kv in enumerate(kv_layers)), strict=True)
        fields = vars(own) | {"heads": heads, "windows": windows, "num_kv_heads": heads[0].num_kv_heads}
        model = AssistantConfig(**fields, kv_layers=kv_layers)
        return cls(path, model, target.vocab_size, (), backbone, _clusters(raw, own.vocab_size, source))

    @property
    def embedding_size(self) -> int:
        return self.backbone

    def build(self, group: TPGroup, max_position: int, device: torch.device) -> "AssistantModel":
        return AssistantModel(self, group, max_position, device)

    @property
    def weight_names(self) -> NameMap:
        """Map checkpoint names to parameters. The checkpoint's embedding serves only as vocabulary head, if the two are
        tied."""
        # `embed_tokens` is the target's here, so the checkpoint's tie is expressed by the alias below
        names = weight_names(dataclasses.replace(self.model, tie_embeddings=False))
        rules = {
            "pre_projection": "pre_projection",
            "post_projection": "post_projection",
            "clusters.centroids": "masked_embedding.centroids",
            "clusters.tokens": "masked_embedding",
        }
        tied = self.model.tie_embeddings
        return dataclasses.replace(
            names,
            rules={**rules, **names.rules},
            aliases=(*names.aliases, *((("model.embed_tokens.", "lm_head."),) if tied else ())),
            ignored=(*names.ignored, *(() if tied else ("model.embed_tokens.*",))),
        )


def _read_layers(raw: Mapping[str, Any], source: str) -> Gemma4Config:
    """Read the configuration of the layers, as if they had KV. Raises ValueError for settings that no assistant has."""
    text = section_of(raw, "text_config", source)
    shared, count = (
        size_of(text, key, source, 0, min_value=0) for key in ("num_kv_shared_layers", "num_hidden_layers")
    )
    if shared not in (0, count):
        raise ValueError(
            f"{source}: num_kv_shared_layers={shared}: all {count} layers of an assistant attend to the target's KV; "
            "correct it, or download the checkpoint again"
        )
    own = read_config({**raw, "text_config": {**text, "num_kv_shared_layers": 0}}, source)
    others = {
        "hidden_size_per_layer_input": own.input_size,
        "enable_moe_block": own.experts is not None,
        "use_double_wide_mlp": own.shared_width != own.intermediate_size,
    }
    for name, value in others.items():
        if value:
            raise ValueError(f"{source}: {name}={value} is not supported in an assistant; only {type(value)()} is")
    return own


def _fitted(own: Gemma4Config, layer: int, target: Gemma4Config, kv: int, source: str) -> tuple[Heads, int | None]:
    """Return heads and window of layer `layer`, which attends to the KV of the target's layer `kv`. The number of K/V
    heads is the target's. Raises ValueError if the queries do not fit the KV."""
    heads, theirs = own.heads[layer], target.heads[kv]
    if heads.head_dim != theirs.head_dim or own.num_heads % theirs.num_kv_heads:
        raise ValueError(
            f"{source}: layer {layer} has {own.num_heads} query heads of {heads.head_dim}, the target's layer {kv} "
            f"{theirs.num_kv_heads} K/V heads of {theirs.head_dim}; use the assistant that was trained for this target"
        )
    window, seen = own.windows[layer], target.windows[kv]
    if seen is None or own.kinds[layer] != SLIDING:
        return dataclasses.replace(heads, num_kv_heads=theirs.num_kv_heads), None
    if window not in (None, seen) or seen < 2:
        raise ValueError(
            f"{source}: sliding_window={window}, the target has {seen}: must be equal, and at least 2; use the "
            "assistant that was trained for this target"
        )
    return dataclasses.replace(heads, num_kv_heads=theirs.num_kv_heads), seen - 1


def _clusters(raw: Mapping[str, Any], vocab_size: int, source: str) -> VocabClusters | None:
    """Return the clusters of the vocabulary, by which the head computes only likely logits; None without."""
    if not flag_of(raw, "use_ordered_embeddings", source):
        return None
    count = size_of(raw, "num_centroids", source, 2048)
    best = size_of(raw, "centroid_intermediate_top_k", source, 32)
    if vocab_size % count or best > count:
        raise ValueError(
            f"{source}: num_centroids={count}, centroid_intermediate_top_k={best}: the first must divide vocab_size="
            f"{vocab_size}, and the second be at most as many; correct it, or download the checkpoint again"
        )
    return VocabClusters(count, best)


class AssistantModel(DraftModel):
    """An assistant on one rank. The output of its last norm is its recurrent state; later draft steps use its
    projection in place of the target's hidden state. Contexts come from `TargetKVRunner`."""

    reads_last_layer = True

    def __init__(self, method: Gemma4Assistant, group: TPGroup, max_position: int, device: torch.device) -> None:
        super().__init__(method, group)
        model = method.model
        widths = [(heads.rope, heads.head_dim) for heads in model.heads]
        tables = {key: RotaryTable(*key, max_position, device) for key in dict.fromkeys(widths)}
        self.rotary = [tables[key] for key in widths]
        self.embedding_scale = in_default_dtype(method.backbone**0.5)
        self.pre_projection = ReplicatedLinear(2 * method.backbone, model.hidden_size, bias=False)
        self.layers = nn.ModuleList(make_layer(model, layer, group) for layer in range(model.num_layers))
        self.norm = FullPrecisionRMSNorm(model.hidden_size, model.rms_eps)
        self.post_projection = ReplicatedLinear(model.hidden_size, method.backbone, bias=False)
        self.clusters = None
        if method.clusters is not None:
            self.clusters = Clusters(method.clusters, model.hidden_size, self.lm_head.shard)

    def extend(self, ids: Tensor, features: Tensor, context: ForwardContext) -> Tensor:
        return self._run(ids, features, context)

    def keep(self, ids: Tensor, features: Tensor, context: ForwardContext) -> None:
        """Do nothing: it has no KV."""

    def step(self, ids: Tensor, hidden: Tensor, context: ForwardContext) -> Tensor:
        return self._run(ids, self.post_projection(hidden), context)

    def _run(self, ids: Tensor, backbone: Tensor, context: ForwardContext) -> Tensor:
        """Run all layers. backbone: [rows, backbone] the target's hidden states, or projected recurrent states."""
        embedded = self.embed_tokens(ids) * self.embedding_scale
        stream: Tensor = self.pre_projection(torch.cat((embedded, backbone), dim=-1))
        for layer, rotary in zip(self.layers, self.rotary, strict=True):
            assert isinstance(layer, DecoderLayer) and layer.tail is not None
            normed = layer.input_layernorm.for_product(stream, layer.self_attn.fp8_inputs)
            added, stream = layer(normed, stream, rotary.at(context.positions), context)
            stream = layer.tail(stream.add_(added), None)
        state: Tensor = self.norm(stream)
        return state

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        return logits if self.clusters is None else self.clusters.mask(hidden, logits)


class Clusters(nn.Module):
    """Restricts proposals to the clusters of tokens whose centroids score best for a state."""

    def __init__(self, clusters: VocabClusters, hidden_size: int, shard: VocabShard) -> None:
        super().__init__()
        self.best = clusters.best
        self.centroids = ReplicatedLinear(hidden_size, clusters.count, bias=False)
        self.tokens = TokenClusters(clusters.count, shard)

    def mask(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """Set logits [rows, shard size] of tokens in other clusters to minus infinity, for states [rows, hidden]."""
        scores = self.centroids(hidden)
        hides = torch.ones_like(scores, dtype=torch.bool).scatter_(1, scores.topk(self.best, dim=-1).indices, False)
        return logits.masked_fill_(hides.index_select(1, self.tokens.cluster_of), float("-inf"))


class TokenClusters(WeightedModule):
    """The cluster of each token.

    cluster_of: [shard size] int64, by token of this rank; 0 for padding.
    """

    def __init__(self, count: int, shard: VocabShard) -> None:
        super().__init__()
        self.count, self.shard = count, shard
        self.cluster_of = nn.Parameter(torch.zeros(shard.size, dtype=torch.int64), requires_grad=False)

    def weight_keys(self) -> tuple[WeightKey, ...]:
        return (WeightKey("token_ordering"),)

    def load(self, key: WeightKey, full: Tensor) -> None:
        """Store the clusters of this rank's part of the vocabulary. full: [vocabulary] integers, tokens in order of
        clusters."""
        shard = self.shard
        check_shape(full, (shard.vocab_size,))
        if full.dtype.is_floating_point:
            raise WrongTensorError(f"is {full.dtype}, must be integers")
        self.cluster_of.data.zero_()
        if not Capability.of(full.device).has_memory:
            return
        order = full.long()
        if not torch.equal(order.sort().values, torch.arange(shard.vocab_size, device=order.device)):
            raise WrongTensorError("does not name every token once")
        clusters = torch.empty_like(order)
        clusters[order] = torch.arange(shard.vocab_size, device=order.device) // (shard.vocab_size // self.count)
        self.cluster_of.data[: shard.end - shard.first].copy_(clusters[shard.first : shard.end])

    def fill_dummy(self, generator: torch.Generator) -> None:
        shard = self.shard
        own = torch.arange(shard.first, shard.end, device=self.cluster_of.device)
        self.cluster_of.data.zero_()
        self.cluster_of.data[: shard.end - shard.first] = own // (shard.vocab_size // self.count)
