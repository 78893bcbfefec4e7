"""Llama 4's text part, for texts of at most one attention chunk: Llama layers with experts, some without RoPE.

A router's sigmoid multiplies the input of the chosen expert, not its output. RoPE rotates adjacent pairs, so the rows
of the q and k projections are reordered when they are loaded. The norms of q and k have no weights, so the order does
not matter to them.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from workers.distributed.tp_group import TPGroup
from workers.layers.decoder_layer import DecoderLayer, FeedForward
from workers.layers.mlp import GatedMLP
from workers.layers.moe import MixtureOfExperts
from workers.layers.norm import UnitRMSNorm
from workers.layers.weighted import WrongTensorError
from workers.models.family import ModelFamily
from workers.models.llama import LlamaForCausalLM, make_attention, text_weight_names
from workers.models.llama4.config import Llama4Config, read_config
from workers.models.moe import outputs_first, stacked_experts
from workers.models.name_map import NameMap, Packed
from workers.ops.experts.route import TokenSlots
from workers.ops.fp8.rows import Fp8Rows
from workers.ops.gemm.workspace import GEMMOptions

_OTHERS = ("vision_model.*", "model.vision_model.*")  # towers, in addition to those of `text_weight_names`
_BY_ROW = ("weight", "bias", "weight_scale", "weight_packed")  # kinds of tensors with a row for each output


class InputScaledExperts(MixtureOfExperts):
    """One expert per row, whose input is multiplied by the sigmoid of its logit, and a shared expert."""

    def __init__(self, config: Llama4Config, group: TPGroup) -> None:
        width = config.intermediate_size
        super().__init__(config.hidden_size, width, config.routing, group, whole_experts=config.whole_experts)
        self.shared_experts = GatedMLP(config.hidden_size, width, group)

    def partial(self, x: Tensor | Fp8Rows, live: TokenSlots | None = None) -> Tensor:
        plain = x if isinstance(x, Tensor) else x.plain
        assert plain is not None and self.shared_experts is not None, "the router needs rows in the model's dtype"
        router = self.router(plain, live)
        scale = router.logits().amax(-1, keepdim=True).sigmoid().to(plain.dtype)
        routed = self.experts.method.multiply(plain * scale, router)
        return self.shared_experts.partial(x).add_(routed)

    def finish(self, options: GEMMOptions) -> None:
        """Do not join the shared expert, because its input differs from the routed one's."""


def make_layer(config: Llama4Config, layer: int, group: TPGroup) -> DecoderLayer:
    mlp: FeedForward
    if layer in config.moe_layers:
        mlp = InputScaledExperts(config, group)
    else:
        mlp = GatedMLP(config.hidden_size, config.dense_width, group)
    own = replace(config, qk_norm=config.qk_norm and config.rotated[layer])
    attention = make_attention(own, layer, group, config.hidden_size, UnitRMSNorm)
    return DecoderLayer(config.hidden_size, config.rms_eps, attention, mlp, group)


class Llama4ForCausalLM(LlamaForCausalLM):
    make_layer = staticmethod(make_layer)


def weight_names(config: Llama4Config) -> NameMap:
    """Return the names in Hugging Face's checkpoints, which stack 16-bit experts, inputs first."""
    names = text_weight_names(config)
    layer, hidden, width = "model.layers.{layer}", config.hidden_size, config.intermediate_size
    ours, theirs = "layers.{layer}.mlp", f"{layer}.feed_forward"
    gate_up, down = stacked_experts(f"{theirs}.experts", config.routing.num_experts)
    rules = {
        f"{ours}.router": f"{theirs}.router",
        f"{ours}.experts": f"{theirs}.experts.{{expert}}.{{part}}",
        f"{ours}.shared_experts.gate_up": f"{theirs}.shared_expert.{{part}}",
        f"{ours}.shared_experts.{{module}}": f"{theirs}.shared_expert.{{module}}",
        f"{ours}.gate_up": f"{theirs}.{{part}}",
        f"{ours}.{{module}}": f"{theirs}.{{module}}",
    }
    return replace(
        names,
        rules=rules | dict(names.rules) | rules,  # these are tried first, and replace Llama's of the same name
        ignored=(*names.ignored, *_OTHERS),
        packed=(
            _halves(f"{layer}.self_attn.q_proj", config.num_heads, config.head_dim),
            _halves(f"{layer}.self_attn.k_proj", config.num_kv_heads, config.head_dim),
            outputs_first(gate_up, 2 * width, hidden),
            outputs_first(down, hidden, width),
        ),
    )


def _halves(name: str, heads: int, head_dim: int) -> Packed:
    """Return the rule that moves the even rows of each head before its odd ones, so that RoPE rotates halves."""

    def split(full: Tensor, kind: str) -> Sequence[Tensor]:
        if full.dim() == 0 or full.numel() == 1:  # a scale of the whole matrix
            return [full]
        if kind not in _BY_ROW or full.shape[0] != heads * head_dim:
            raise WrongTensorError(f"has shape {tuple(full.shape)}; q and k are served with rows of {heads} heads")
        pairs = full.view(heads, head_dim // 2, 2, *full.shape[1:])
        return [pairs.transpose(1, 2).flatten(0, 2)]

    return Packed(f"{name}.{{kind}}", (f"{name}.{{kind}}",), split)


FAMILY = ModelFamily(read_config, Llama4ForCausalLM, weight_names)
