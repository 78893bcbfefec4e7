"""Grouped-query attention over a `ForwardContext`, with the checkpoint's scales of FP8 KV: per layer, one for keys and
one for values."""

import logging
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows
from aerie.kernels.host_layer import HostLayer, HostProduct
from aerie.kernels.kv.stored_values import FP8_MAX, KVScales
from aerie.kernels.norm.head_norms import HeadNorms
from aerie.kernels.norm.norm import sigmoid_mul
from aerie.kernels.rope.rope_store import Angles
from aerie.kernels.span import Span
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.decoder_layer import AttentionLayer
from aerie.workers.layers.forward_context import ForwardContext
from aerie.workers.layers.linear import QKV, QKVParallelLinear, RowParallelLinear, kv_head_span, rank_span
from aerie.workers.layers.norm import ProjectionNorm, RMSNorm, norm_projections
from aerie.workers.layers.weighted import Vector, WeightedModule, WeightKey, WrongTensorError

logger = logging.getLogger(__name__)


class KVScaleWeights(WeightedModule):
    """The tensors `k_scale` and `v_scale` of a layer's attention, stored as floats on the host, because kernels take
    them as arguments. 1 if the checkpoint has none. Unused unless KV is FP8.

    layer: index in the KV pool.
    missing: whether the checkpoint has none.
    """

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.values = {"k_scale": 1.0, "v_scale": 1.0}
        self.missing = True

    def weight_keys(self) -> Iterable[WeightKey]:
        return [WeightKey(kind) for kind in self.values]

    def load(self, key: WeightKey, full: Tensor) -> None:
        if full.numel() != 1:
            raise WrongTensorError(f"has shape {tuple(full.shape)}: KV in FP8 has one scale per layer")
        if not full.is_meta:
            value = float(full)
            if not 0 < value < math.inf:
                raise WrongTensorError(f"is {value}: a scale is a finite number above 0")
            self.values[key.kind] = value
        self.missing = False

    def fill_missing(self, key: WeightKey) -> bool:
        return True

    def check_values(self, key: WeightKey, full: Tensor) -> None:
        if float(full) != self.values[key.kind]:
            raise WrongTensorError(f"is {float(full):g}, and cached KV has the scale {self.values[key.kind]:g}")

    def fill_dummy(self, generator: torch.Generator) -> None:
        pass


def kv_scales(model: nn.Module) -> dict[int, KVScales]:
    """Return the KV scales by layer index in the KV pool."""
    return {
        attention.layer: KVScales(attention.values["k_scale"], attention.values["v_scale"]) for attention in _of(model)
    }


def warn_of_missing(model: nn.Module, name: str) -> None:
    """Log a warning if layers of the model have no scales. name: name of the model."""
    missing = [attention.layer for attention in _of(model) if attention.missing]
    if missing:
        logger.warning(
            "%s: KV is kept in FP8, and the checkpoint has no k_scale and v_scale of %d layers: they get 1, and "
            "numbers beyond %g saturate",
            name,
            len(missing),
            FP8_MAX,
        )


def _of(model: nn.Module) -> list[KVScaleWeights]:
    return [module for module in model.modules() if isinstance(module, KVScaleWeights)]


class Attention(AttentionLayer):
    """Grouped-query attention.

    layer: index in the KV pool.
    num_heads, num_kv_heads: heads of the model; the attributes are this rank's.
    input_size, output_size: row sizes of input and output.
    norm_eps: epsilon of the q and k norms per head (Qwen3); None without them.
    norm: class of these norms.
    norms_projections: q and k norms are over all heads together, see `ProjectionNorm` (OLMo 2).
    gated: multiply each head's output by the sigmoid of a gate, elementwise (Qwen3-Next).
    value_norm: norm values per head, without a weight; needs norm_eps (Gemma 4).
    keys_as_values: no v_proj; values are the keys before norm and RoPE (Gemma 4).
    kv_layer: attend to this layer's KV; the layer then projects queries only (Gemma 4). None: its own KV.
    rule: from `ModelConfig.score_rule`; None: softmax(q . k / sqrt(head_dim)).
    """

    def __init__(
        self,
        layer: int,
        group: TPGroup,
        *,
        input_size: int,
        output_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        o_bias: bool,
        norm_eps: float | None,
        norm: type[RMSNorm] = RMSNorm,
        norms_projections: bool = False,
        gated: bool = False,
        value_norm: bool = False,
        keys_as_values: bool = False,
        kv_layer: int | None = None,
        rule: ScoreRule | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer if kv_layer is None else kv_layer
        self.has_kv = kv_layer is None
        self.head_dim = head_dim
        self.rule = rule or ScoreRule(head_dim**-0.5)
        projections = QKV[: 1 if not self.has_kv else 2 if keys_as_values else 3]
        self.qkv = QKVParallelLinear(input_size, num_heads, num_kv_heads, head_dim, group, qkv_bias, gated, projections)
        self.num_heads, self.num_kv_heads = self.qkv.num_heads, self.qkv.num_kv_heads
        self.o_proj = RowParallelLinear(num_heads * head_dim, output_size, group, "num_attention_heads", o_bias)
        self.q_norm = None if norm_eps is None else norm(head_dim, norm_eps)
        self.k_norm = None if norm_eps is None or not self.has_kv else norm(head_dim, norm_eps)
        self.norms_values = value_norm and self.has_kv
        self._projection_norms: tuple[ProjectionNorm, ProjectionNorm] | None = None
        heads = rank_span(num_heads, group, "num_attention_heads")
        if norms_projections:
            assert norm_eps is not None and projections == QKV and not gated, "no family has both"
            kv_heads = Span(*kv_head_span(num_kv_heads, group), num_kv_heads)
            norms = ProjectionNorm(heads, head_dim, norm_eps), ProjectionNorm(kv_heads, head_dim, norm_eps)
            self.q_norm, self.k_norm = self._projection_norms = norms
        self.kv_scales = KVScaleWeights(layer) if self.has_kv else None
        self.gated = gated
        # one more score per query head, without a value (gpt-oss)
        self.sinks = Vector("sinks", heads, torch.float32) if self.rule.has_sinks else None

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        return self.qkv.method.fp8_inputs

    @property
    def head_norms(self) -> HeadNorms | None:
        """The norms per head, which the RoPE kernel applies."""
        if self.q_norm is None or self._projection_norms is not None:
            return None
        k = None if self.k_norm is None else self.k_norm.weight
        return HeadNorms(self.q_norm.weight, k, self.q_norm.eps, self.norms_values)

    def host_layer(self, gate_up: HostProduct, down: HostProduct, norm: Tensor, eps: float) -> HostLayer | None:
        qkv, o_proj, rule = self.qkv.host_product, self.o_proj.host_product, self.rule
        has_three = (
            self.has_kv and self.qkv.shape.out_features == (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        )
        is_plain = not self.gated and self.q_norm is None and rule.soft_cap is None and not rule.has_sinks
        if qkv is None or o_proj is None or not has_three or not is_plain:
            return None
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        return HostLayer(qkv, o_proj, gate_up, down, norm, eps, *heads, rule.scale, rule.window)

    def partial(self, x: Tensor | Fp8Rows, angles: Angles, context: ForwardContext) -> Tensor:
        q, kv, gate = self._heads(x)
        sinks = None if self.sinks is None else self.sinks.weight
        out = context.attend(self.layer, q, kv, angles, self.rule, sinks, self.head_norms)
        if gate is not None:
            out = sigmoid_mul(out.contiguous(), context.attending_rows(gate))
        return self.o_proj.partial(out.flatten(1))

    def keep(self, x: Tensor | Fp8Rows, angles: Angles, context: ForwardContext) -> None:
        if not self.has_kv:
            return
        kv: tuple[Tensor, ...]
        if self._projection_norms is None:
            stored = self.qkv.keys_values(x)
            heads = stored.view(stored.shape[0], -1, self.head_dim)
            q, kv = heads[:, :0], (heads[:, : self.num_kv_heads], heads[:, -self.num_kv_heads :])
        else:
            q, kv = self._heads(x)[:2]
        context.for_layer(self.layer).keep(self.layer, q, kv, angles, self.head_norms)

    def _heads(self, x: Tensor | Fp8Rows) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None]:
        """Return (q, kv, gate) before RoPE and `head_norms`.

        q, gate: [rows, heads, head_dim]; gate is None unless `gated`.
        kv: k and v [rows, kv_heads, head_dim], or ().
        """
        heads = self.qkv(x).unflatten(1, (-1, self.head_dim))
        num_q = self.num_heads * (1 + self.gated)
        q, gate = heads[:, :num_q], None
        if self.gated:
            q, gate = q[:, 0::2], q[:, 1::2]
        if not self.has_kv:
            return q, (), gate
        k, v = heads[:, num_q : num_q + self.num_kv_heads], heads[:, -self.num_kv_heads :]
        if self._projection_norms is not None:
            q, k = norm_projections(self._projection_norms, (q, k), self.o_proj.group)
        return q, (k, v), gate
