"""Gemma 4 (text). Its layers may have two head sizes, keys that are also values, the KV of an earlier layer, an
embedding each (per-layer embedding, PLE), and experts in parallel with the MLP."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from aerie.kernels.experts.gated import GATED, GatedActivation
from aerie.kernels.experts.route import Routing, TokenSlots
from aerie.kernels.fp8.rows import Fp8Rows
from aerie.kernels.norm.norm import ACTIVATIONS
from aerie.kernels.span import Span
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.attention import Attention
from aerie.workers.layers.decoder_layer import AttentionLayer, FeedForward, LayerInputs, LayerTail, SandwichLayer
from aerie.workers.layers.linear import ReplicatedLinear
from aerie.workers.layers.moe import Experts, GatedMLP
from aerie.workers.layers.norm import FullPrecisionRMSNorm
from aerie.workers.layers.rotary import RotaryTable
from aerie.workers.layers.routing import Router
from aerie.workers.layers.vocab import VocabEmbedding
from aerie.workers.layers.weighted import Vector, WeightKey
from aerie.workers.models import llama
from aerie.workers.models.decoder import Decoder, in_default_dtype
from aerie.workers.models.gemma.gemma4_config import Gemma4Config, read_config
from aerie.workers.models.moe import stacked_experts
from aerie.workers.models.name_map import NameMap
from aerie.workers.models.registry import ModelFamily


class Gemma4Layer(SandwichLayer):
    """A layer with experts in parallel with its MLP (None: without), and its `Gemma4Tail`."""

    def __init__(
        self,
        hidden_size: int,
        rms_eps: float,
        attention: AttentionLayer,
        mlp: FeedForward,
        group: TPGroup,
        experts: "ExpertsBeside | None",
        tail: "Gemma4Tail",
    ) -> None:
        super().__init__(hidden_size, rms_eps, attention, mlp, group, FullPrecisionRMSNorm)
        self.experts = experts
        self.post_feedforward_layernorm_1 = None if experts is None else FullPrecisionRMSNorm(hidden_size, rms_eps)
        self.tail = tail

    def _feed_forward(self, normed: Tensor | Fp8Rows, residual: Tensor, live: TokenSlots) -> Tensor:
        out: Tensor = super()._feed_forward(normed, residual, live)
        if self.experts is None or self.post_feedforward_layernorm_1 is None:
            return out
        out = self.post_feedforward_layernorm_1(out)  # before the experts' all-reduce reuses its buffer
        routed: Tensor = self.experts(residual, live)
        return out + routed


class RouterNorm(FullPrecisionRMSNorm):
    """The norm of a router's inputs. Its weight is the checkpoint's `scale` / sqrt(hidden_size)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.kind = "scale"

    def load(self, key: WeightKey, full: Tensor) -> None:
        super().load(key, full)
        self.weight.data.mul_(full.numel() ** -0.5)


class ExpertsBeside(nn.Module):
    """norm(experts(norm(x))) for the residual stream x before the MLP's norm. The router has a norm of its own.

    width: intermediate size of an expert.
    whole: see `aerie.workers.layers.moe.MixtureOfExperts`.
    """

    def __init__(
        self,
        hidden_size: int,
        width: int,
        routing: Routing,
        rms_eps: float,
        group: TPGroup,
        activation: GatedActivation,
        whole: bool,
    ) -> None:
        super().__init__()
        self.group = group
        self.router_norm = RouterNorm(hidden_size, rms_eps)
        self.router = Router(hidden_size, routing)
        self.pre_norm = FullPrecisionRMSNorm(hidden_size, rms_eps)
        self.matrices = Experts(
            routing.num_experts,
            hidden_size,
            width,
            group,
            routing.experts_per_token,
            whole=whole and group.size > 1,
            activation=activation,
        )
        self.post_norm = FullPrecisionRMSNorm(hidden_size, rms_eps)

    def forward(self, x: Tensor, live: TokenSlots) -> Tensor:
        """Return the output, summed over ranks, [rows, hidden_size] for x [rows, hidden_size]."""
        router = self.router(self.router_norm(x), live)
        buffer = self.group.all_reduce_buffer(x.shape[0], x.shape[1], x.dtype)
        part = self.matrices.method.multiply(self.pre_norm(x), router, buffer)
        out: Tensor = self.post_norm(self.group.all_reduce(part))
        return out


class Gemma4Tail(LayerTail):
    """(x + norm(W (activation(G x) * input))) * layer_scalar, or x * layer_scalar without a layer's input.

    input_size: size of the layer's input; 0: none.
    """

    def __init__(self, hidden_size: int, input_size: int, rms_eps: float, activation: str) -> None:
        super().__init__()
        self.scalar = Vector("layer_scalar", Span.whole(1))
        self.activation = ACTIVATIONS[activation]
        self.gate = ReplicatedLinear(hidden_size, input_size) if input_size else None
        self.projection = ReplicatedLinear(input_size, hidden_size) if input_size else None
        self.norm = FullPrecisionRMSNorm(hidden_size, rms_eps) if input_size else None

    def forward(self, stream: Tensor, layer_input: Tensor | None) -> Tensor:
        if layer_input is not None:
            assert self.gate is not None and self.projection is not None and self.norm is not None
            gated = self.activation(torch.cat((self.gate(stream), layer_input), dim=-1))
            stream = stream.add_(self.norm(self.projection(gated)))
        return stream.mul_(self.scalar.weight)


class PerLayerEmbedding(LayerInputs):
    """(E * sqrt(size) + norm(P x / sqrt(hidden_size))) / sqrt(2), where E is each layer's own embedding of the token,
    and x the model's embedding.

    size: size of a layer's input.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, num_layers: int, size: int, rms_eps: float, group: TPGroup
    ) -> None:
        super().__init__()
        self.size = size
        self.embedding = VocabEmbedding(vocab_size, num_layers * size, group)
        self.embedding_scale = in_default_dtype(size**0.5)
        self.projection = ReplicatedLinear(hidden_size, num_layers * size)
        self.projection_scale = hidden_size**-0.5
        self.norm = FullPrecisionRMSNorm(size, rms_eps)

    def forward(self, ids: Tensor, embedded: Tensor) -> Tensor:
        own = self.embedding(ids) * self.embedding_scale
        projected = (self.projection(embedded) * self.projection_scale).unflatten(1, (-1, self.size))
        inputs: Tensor = (self.norm(projected) + own.view_as(projected)) * 2.0**-0.5
        return inputs.transpose(0, 1)


def make_layer(config: Gemma4Config, layer: int, group: TPGroup) -> Gemma4Layer:
    """Return one decoder layer without weights."""
    heads, hidden, eps = config.heads[layer], config.hidden_size, config.rms_eps
    attention = Attention(
        layer,
        group,
        input_size=hidden,
        output_size=hidden,
        num_heads=config.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        qkv_bias=config.qkv_bias,
        o_bias=config.o_bias,
        norm_eps=eps,
        norm=FullPrecisionRMSNorm,
        value_norm=True,
        keys_as_values=heads.keys_as_values,
        kv_layer=config.kv_layer(layer),
        rule=config.score_rule(layer),
    )
    experts = None
    if config.experts is not None:
        one, activation = config.experts, GATED[config.activation]
        experts = ExpertsBeside(hidden, one.width, one.routing, eps, group, activation, config.whole_experts)
    return Gemma4Layer(
        hidden,
        eps,
        attention,
        GatedMLP(hidden, config.mlp_width(layer), group, config.activation),
        group,
        experts,
        Gemma4Tail(hidden, config.input_size, eps, config.activation),
    )


class Gemma4ForCausalLM(Decoder):
    """See `Decoder`. max_position: rows of the rotary tables, on `device`."""

    def __init__(
        self,
        config: Gemma4Config,
        group: TPGroup,
        max_position: int,
        device: torch.device,
        capture: tuple[int, ...] = (),
    ) -> None:
        keys = [(heads.rope, heads.head_dim) for heads in config.heads]
        tables = {key: RotaryTable(*key, max_position, device) for key in dict.fromkeys(keys)}
        inputs = (config.vocab_size, config.hidden_size, config.num_layers, config.input_size, config.rms_eps, group)
        super().__init__(
            config,
            group,
            [tables[key] for key in keys],
            [make_layer(config, layer, group) for layer in range(config.num_layers)],
            capture,
            FullPrecisionRMSNorm,
            embedding_scale=in_default_dtype(config.hidden_size**0.5),
            logit_cap=config.logit_cap,
            layer_inputs=PerLayerEmbedding(*inputs) if config.input_size else None,
        )


def weight_names(config: Gemma4Config) -> NameMap:
    """Return the names in Hugging Face's checkpoints. Ignored: projections to KV of layers that read the KV of
    another layer."""
    names, layer = llama.text_weight_names(config), "layers.{layer}"
    name = f"model.{layer}"
    rules = {
        f"{layer}.experts.router_norm": f"{name}.router",
        f"{layer}.experts.router.scales": f"{name}.router",
        f"{layer}.experts.router": f"{name}.router.proj",
        f"{layer}.experts.matrices": f"{name}.experts.{{expert}}.{{part}}",
        f"{layer}.experts.pre_norm": f"{name}.pre_feedforward_layernorm_2",
        f"{layer}.experts.post_norm": f"{name}.post_feedforward_layernorm_2",
        f"{layer}.tail.scalar": name,
        f"{layer}.tail.gate": f"{name}.per_layer_input_gate",
        f"{layer}.tail.projection": f"{name}.per_layer_projection",
        f"{layer}.tail.norm": f"{name}.post_per_layer_input_norm",
        "layer_inputs.embedding": "model.embed_tokens_per_layer",
        "layer_inputs.projection": "model.per_layer_model_projection",
        "layer_inputs.norm": "model.per_layer_projection_norm",
    }
    shared = [i for i in range(config.num_layers) if config.kv_layer(i) is not None]
    unused = [f"model.layers.{i}.self_attn.[kv]_*" for i in shared]
    experts = config.experts
    packed = () if experts is None else stacked_experts(f"{name}.experts", experts.routing.num_experts)
    return replace(names, rules={**rules, **names.rules}, ignored=(*names.ignored, *unused), packed=packed)


FAMILY = ModelFamily(read_config, Gemma4ForCausalLM, weight_names)
