"""A plain torch reading of the published EAGLE-3 modules: whole texts, no cache, no fused layers, float32. Written from
EAGLE-3 (arXiv 2503.01840), EAGLE-3.1 (2605.09992) and the checkpoints' configurations."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

THETA, EPS = 10000.0, 1e-6


@dataclass(frozen=True)
class Head:
    """A tiny head. hidden: its own width; target_hidden: of each of the num_captured layers that it reads, 0 of them if
    it reads the target's final hidden state. own_embedding: whether the checkpoint has one."""

    target_hidden: int = 64
    hidden: int = 64
    layers: int = 1
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    mlp: int = 96
    vocab: int = 96
    draft_vocab: int = 40
    num_captured: int = 3
    own_embedding: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    fc_bias: bool = False

    def layer_config(self) -> dict[str, Any]:
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.dim,
            "vocab_size": self.vocab,
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            "max_position_embeddings": 512,
            "attention_bias": self.attention_bias,
            "hidden_act": "silu",
        }

    def tensors(self, seed: int = 3) -> dict[str, Tensor]:
        """Under the names of newer checkpoints: layers.0, layers.1 and so on."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator) * 0.2

        def norm(size: int) -> Tensor:
            return 0.5 + torch.rand(size, generator=generator)

        picked = torch.randperm(self.vocab, generator=generator)[: self.draft_vocab].sort().values
        tensors = {
            "norm.weight": norm(self.hidden),
            "lm_head.weight": normal(self.draft_vocab, self.hidden),
            "d2t": picked - torch.arange(self.draft_vocab),
            "t2d": torch.zeros(self.vocab, dtype=torch.bool).index_fill(0, picked, True),
        }
        width = self.num_captured * self.target_hidden
        if width:
            tensors["fc.weight"] = normal(self.hidden, width)
        if self.fc_bias:
            tensors["fc.bias"] = normal(self.hidden)
        if self.norm_before_fc:
            tensors["input_norm.weight"] = norm(width)
        if self.fc_norm:
            tensors |= {f"fc_norm.{i}.weight": norm(self.target_hidden) for i in range(self.num_captured)}
        if self.own_embedding:
            tensors["embed_tokens.weight"] = normal(self.vocab, self.hidden)
        for i in range(self.layers):
            width = self.hidden * (2 if i == 0 else 1)
            sizes = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
            layer = {f"self_attn.{name}.weight": normal(n * self.dim, width) for name, n in sizes.items()}
            layer["self_attn.o_proj.weight"] = normal(self.hidden, self.heads * self.dim)
            if self.attention_bias:
                layer |= {f"self_attn.{name}.bias": normal(n * self.dim) for name, n in sizes.items()}
                layer["self_attn.o_proj.bias"] = normal(self.hidden)
            if self.qk_norm:
                layer |= {f"self_attn.{name}_norm.weight": norm(self.dim) for name in "qk"}
            layer |= {f"mlp.{name}.weight": normal(self.mlp, self.hidden) for name in ("gate_proj", "up_proj")}
            layer["mlp.down_proj.weight"] = normal(self.hidden, self.mlp)
            norms = ("input_layernorm", "post_attention_layernorm", *(("hidden_norm",) if i == 0 else ()))
            layer |= {f"{name}.weight": norm(self.hidden) for name in norms}
            tensors |= {f"layers.{i}.{name}": tensor for name, tensor in layer.items()}
        return tensors


class Reference:
    """The function of a head with these tensors. embedding: the target's table, of heads without one."""

    def __init__(self, head: Head, tensors: dict[str, Tensor], embedding: Tensor) -> None:
        self.head, self.tensors = head, tensors
        self.embedding = tensors.get("embed_tokens.weight", embedding)

    def draft(self, features: Tensor, ids: Tensor, chain: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """States [hidden] and logits [draft_vocab] after a text of rows features [n, F] with the next tokens ids [n],
        and after each token of `chain` [k] that follows: k + 1 of each."""
        hidden, states, logits = self._project(features), [], []
        for drafted in range(len(chain) + 1):
            state = self._stack(self.embedding[torch.cat((ids, chain[:drafted]))], hidden)[-1]
            normed = self._norm(state, "norm")
            states.append(normed if self.head.norm_output else state)
            logits.append(normed @ self.tensors["lm_head.weight"].T)
            hidden = torch.cat((hidden, states[-1][None]))
        return states, logits

    def _project(self, x: Tensor) -> Tensor:
        head = self.head
        if not head.num_captured:
            return x
        if head.norm_before_fc:
            x = self._norm(x, "input_norm")
        if head.fc_norm:
            parts = x.view(-1, head.num_captured, head.target_hidden).unbind(1)
            x = torch.cat([self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], -1)
        return F.linear(x, self.tensors["fc.weight"], self.tensors.get("fc.bias"))

    def _stack(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """[rows, hidden] after all layers, of rows at positions 0, 1, and so on."""
        feature = self._norm(hidden, "layers.0.hidden_norm")
        stream = feature if self.head.norm_before_residual else hidden
        read = torch.cat((self._norm(embeddings, "layers.0.input_layernorm"), feature), -1)
        for i in range(self.head.layers):
            if i:
                read = self._norm(stream, f"layers.{i}.input_layernorm")
            stream = stream + self._attend(read, f"layers.{i}.self_attn")
            stream = stream + self._mlp(self._norm(stream, f"layers.{i}.post_attention_layernorm"), f"layers.{i}.mlp")
        return stream

    def _attend(self, read: Tensor, name: str) -> Tensor:
        head, rows = self.head, read.shape[0]

        def heads(part: str, count: int) -> Tensor:
            return self._linear(read, f"{name}.{part}_proj").view(rows, count, head.dim)

        q, k, v = heads("q", head.heads), heads("k", head.kv_heads), heads("v", head.kv_heads)
        if head.qk_norm:
            q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        q, k = _turn(q), _turn(k)
        repeats = head.heads // head.kv_heads
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * head.dim**-0.5
        future = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return self._linear(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), f"{name}.o_proj")

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        gated = F.silu(self._linear(x, f"{name}.gate_proj")) * self._linear(x, f"{name}.up_proj")
        return self._linear(gated, f"{name}.down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.tensors[f"{name}.weight"]


def _turn(x: Tensor) -> Tensor:
    """Rotary positions 0, 1, and so on of x [rows, heads, dim], the halves as Hugging Face has them."""
    dim = x.shape[-1]
    steps = THETA ** (-torch.arange(0, dim, 2) / dim)
    angles = (torch.arange(x.shape[0])[:, None] * steps)[:, None]
    low, high = x.chunk(2, -1)
    return torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), -1)


def save_head(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], pickle: bool = False) -> Path:
    """pickle: as pytorch_model.bin."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickle:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(folder / "model.safetensors"))
    return folder
