"""A plain torch reading of the published block drafts: whole texts, no cache, no fused layers, float32. Written from
DFlash (arXiv 2602.06036), and z-lab's and `speculators`' (0.9) modelling code, whose attention masks differ."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.support.drafts.eagle3_reference import save_head

THETA, EPS = 10000.0, 1e-6


@dataclass(frozen=True)
class BlockHead:
    """A tiny head. windows: of each layer, None for full attention; causal: of each layer. in_speculators: windows
    count tokens before the block, as `speculators` does; else tokens up to the row, itself included. kind: dflash,
    dspark (rank, gated), dflash2 (taps, group, rank, candidates) or domino (rank, state, plain). scales:
    input_embedding_scale, output_multiplier and final_logit_softcapping."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    mlp: int = 96
    vocab: int = 96
    draft_vocab: int | None = None
    num_captured: int = 3
    block: int = 8
    mask_id: int = 95
    from_anchor: bool = False
    windows: tuple[int | None, ...] = (None, None)
    causal: tuple[bool, ...] = (False, False)
    in_speculators: bool = False
    kind: str = "dflash"
    rank: int = 24
    gated: bool = False
    taps: int = 2
    group: int = 16
    candidates: int = 12
    state: int = 40
    plain: int = 1
    scales: tuple[float, float, float | None] = (1.0, 1.0, None)

    def layer_config(self) -> dict[str, Any]:
        kinds = ["full_attention" if window is None else "sliding_attention" for window in self.windows]
        window = next((window for window in self.windows if window is not None), None)
        return {
            "model_type": "qwen3",
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
            "attention_bias": False,
            "hidden_act": "silu",
            "layer_types": kinds,
            "sliding_window": window,
            "use_sliding_window": window is not None,
        }

    def tensors(self, seed: int = 3, scale: float = 0.2) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator) * scale

        def norm(size: int) -> Tensor:
            return 0.5 + torch.rand(size, generator=generator)

        tensors = {
            "fc.weight": normal(self.hidden, self.num_captured * self.hidden),
            "hidden_norm.weight": norm(self.hidden),
            "norm.weight": norm(self.hidden),
        }
        if self.draft_vocab is not None:
            picked = torch.randperm(self.vocab, generator=generator)[: self.draft_vocab].sort().values
            tensors["lm_head.weight"] = normal(self.draft_vocab, self.hidden)
            tensors["d2t"] = picked - torch.arange(self.draft_vocab)
            tensors["t2d"] = torch.zeros(self.vocab, dtype=torch.bool).index_fill(0, picked, True)
        for i in range(self.layers):
            sizes = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
            layer = {f"self_attn.{name}_proj.weight": normal(n * self.dim, self.hidden) for name, n in sizes.items()}
            layer["self_attn.o_proj.weight"] = normal(self.hidden, self.heads * self.dim)
            layer |= {f"self_attn.{name}_norm.weight": norm(self.dim) for name in "qk"}
            layer |= {f"mlp.{name}_proj.weight": normal(self.mlp, self.hidden) for name in ("gate", "up")}
            layer["mlp.down_proj.weight"] = normal(self.hidden, self.mlp)
            layer |= {f"{name}.weight": norm(self.hidden) for name in ("input_layernorm", "post_attention_layernorm")}
            if self.kind == "dflash2":
                for name in ("attention_conv", "mlp_conv"):
                    layer[f"{name}.base_kernel"] = normal(2, self.taps, self.hidden) + torch.eye(self.taps)[0, :, None]
                    groups = self.hidden // self.group
                    layer[f"{name}.kernel_projection.weight"] = normal(2 * self.taps * groups, self.hidden)
            tensors |= {f"layers.{i}.{name}": tensor for name, tensor in layer.items()}
        if self.kind == "dspark":
            tensors["markov_head.markov_w1.weight"] = 5 * normal(self.vocab, self.rank)
            tensors["markov_head.markov_w2.weight"] = 5 * normal(self.draft_vocab or self.vocab, self.rank)
            tensors["confidence_head.proj.weight"] = normal(1, self.hidden + self.rank)
            tensors["confidence_head.proj.bias"] = normal(1)
            if self.gated:
                tensors["markov_head.gate_proj.weight"] = normal(self.rank, self.hidden + self.rank)
                tensors["markov_head.gate_proj.bias"] = normal(self.rank)
        if self.kind == "domino":
            tensors["prefix_gru.weight_ih_l0"] = 3 * normal(3 * self.state, self.hidden)
            tensors["prefix_gru.weight_hh_l0"] = 3 * normal(3 * self.state, self.state)
            tensors["embed_proj.0.weight"] = 3 * normal(self.rank, self.hidden + self.state)
            tensors["embed_proj.2.weight"] = 3 * normal(self.vocab, self.rank)
        if self.kind == "dflash2":
            for name in ("predecessor", "successor"):
                tensors[f"candidate_selector.{name}_codebook"] = 5 * normal(self.vocab, self.rank)
            tensors["candidate_selector.hidden_projection.weight"] = normal(self.rank, self.hidden)
        return tensors


class BlockReference:
    """The function of a head with these tensors. embedding, lm_head: the target's tables; a head with its own
    vocabulary has its own lm_head."""

    def __init__(self, head: BlockHead, tensors: dict[str, Tensor], embedding: Tensor, lm_head: Tensor) -> None:
        self.head, self.tensors, self.embedding = head, tensors, embedding
        self.lm_head = tensors.get("lm_head.weight", lm_head)

    def hidden(self, features: Tensor, anchor: int, rows: int | None = None) -> Tensor:
        """States [rows, hidden] of the block after a text whose n tokens have features [n, F] and whose next token is
        `anchor`."""
        head, n = self.head, features.shape[0]
        rows = rows or head.block
        context = self._norm(F.linear(features, self.tensors["fc.weight"]), "hidden_norm")
        x = self.embedding[torch.tensor([anchor] + [head.mask_id] * (rows - 1))] * head.scales[0]
        for i in range(head.layers):
            normed = self._norm(x, f"layers.{i}.input_layernorm")
            before, after = self._convolutions(normed, f"layers.{i}.attention_conv")
            x = x + after(self._attend(before(normed), context, i, n))
            normed = self._norm(x, f"layers.{i}.post_attention_layernorm")
            before, after = self._convolutions(normed, f"layers.{i}.mlp_conv")
            gate, up = (self._linear(before(normed), f"layers.{i}.mlp.{name}_proj") for name in ("gate", "up"))
            x = x + after(self._linear(F.silu(gate) * up, f"layers.{i}.mlp.down_proj"))
        return self._norm(x, "norm")

    def _convolutions(self, x: Tensor, name: str) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """Before and after a sublayer with input x [rows, hidden]; nothing but in DFlash2."""
        if self.head.kind != "dflash2":
            return (lambda y: y), (lambda y: y)
        rows, groups = x.shape[0], self.head.hidden // self.head.group
        dynamic = self._linear(x, f"{name}.kernel_projection").view(rows, 2, self.head.taps, groups)

        def convolution(side: int) -> Callable[[Tensor], Tensor]:
            def convolve(y: Tensor) -> Tensor:
                out = torch.zeros_like(y)
                for row in range(rows):
                    for tap in range(min(self.head.taps, row + 1)):
                        kernel = self.tensors[f"{name}.base_kernel"][side, tap]
                        kernel = kernel + dynamic[row, side, tap].repeat_interleave(self.head.group)
                        out[row] += kernel * y[row - tap]
                return out

            return convolve

        return convolution(0), convolution(1)

    def after(self, hidden: Tensor, depth: int, *path: int) -> Tensor:
        """Logits [draft vocabulary] of `depth` after the tokens `path`, the anchor and its drafts, of the block's
        states. Most heads read the last one only."""
        previous = path[-1]
        state = hidden[depth - 1 if self.head.from_anchor else depth]
        logits, tensors, cap = state @ self.lm_head.T * self.head.scales[1], self.tensors, self.head.scales[2]
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        if self.head.kind == "dspark":
            embedded = tensors["markov_head.markov_w1.weight"][previous]
            if self.head.gated:
                joined = torch.cat((state, embedded))
                bias = tensors["markov_head.gate_proj.bias"]
                embedded = torch.sigmoid(self._linear(joined, "markov_head.gate_proj") + bias) * embedded
            logits = logits + tensors["markov_head.markov_w2.weight"] @ embedded
        if self.head.kind == "domino" and depth > self.head.plain:
            inner = F.silu(self._linear(torch.cat((state, self.path_state(path))), "embed_proj.0"))
            logits = logits + tensors["embed_proj.2.weight"] @ inner
        if self.head.kind == "dflash2":
            best, ids = logits.topk(self.head.candidates)
            first = tensors["candidate_selector.predecessor_codebook"][previous]
            first = first * self._linear(state, "candidate_selector.hidden_projection")
            scores = best + tensors["candidate_selector.successor_codebook"][ids] @ first
            logits = torch.full_like(logits, float("-inf")).index_put((ids,), scores)
        return logits

    def path_state(self, path: tuple[int, ...]) -> Tensor:
        """torch's own GRU over the embeddings of a path."""
        gru = torch.nn.GRU(self.head.hidden, self.head.state, bias=False)
        gru.load_state_dict(
            {f"weight_{part}_l0": self.tensors[f"prefix_gru.weight_{part}_l0"] for part in ("ih", "hh")}
        )
        with torch.no_grad():
            state: Tensor = gru(self.embedding[torch.tensor(path)])[1][0]
        return state

    def proposed(self, hidden: Tensor, depth: int, *path: int, most: int = 64) -> Tensor:
        """`after` of the tokens that a draft may propose: heads with a bias correct a row's `most` best tokens."""
        logits = self.after(hidden, depth, *path)
        if self.head.kind not in ("dspark", "domino"):
            return logits
        state = hidden[depth - 1 if self.head.from_anchor else depth]
        best = (state @ self.lm_head.T).topk(min(most, len(logits))).indices
        return torch.full_like(logits, float("-inf")).index_put((best,), logits[best])

    def logits(self, features: Tensor, anchor: int, rows: int | None = None) -> Tensor:
        """Logits of depths 1 onwards, [depths, draft vocabulary]."""
        logits = self.hidden(features, anchor, rows) @ self.lm_head.T
        return logits if self.head.from_anchor else logits[1:]

    def _attend(self, x: Tensor, context: Tensor, layer: int, n: int) -> Tensor:
        head, name = self.head, f"layers.{layer}.self_attn"
        rows, both = x.shape[0], torch.cat((context, x))
        q = self._linear(x, f"{name}.q_proj").view(rows, head.heads, head.dim)
        k, v = (self._linear(both, f"{name}.{p}_proj").view(n + rows, head.kv_heads, head.dim) for p in "kv")
        q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        q, k = _turn(q, torch.arange(n, n + rows)), _turn(k, torch.arange(n + rows))
        k, v = (each.repeat_interleave(head.heads // head.kv_heads, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * head.dim**-0.5
        weights = scores.masked_fill(~self.visible(layer, n, rows), float("-inf")).softmax(-1)
        return self._linear(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), f"{name}.o_proj")

    def visible(self, layer: int, n: int, rows: int) -> Tensor:
        """[rows, n + rows] bool."""
        query, key = torch.arange(n, n + rows)[:, None], torch.arange(n + rows)[None]
        seen = torch.ones(rows, n + rows, dtype=torch.bool)
        if self.head.causal[layer]:
            seen &= key <= query
        window = self.head.windows[layer]
        if window is not None:
            seen &= (key >= n) | ((key >= n - window) if self.head.in_speculators else (query - key < window))
        return seen

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.tensors[f"{name}.weight"]


def _turn(x: Tensor, positions: Tensor) -> Tensor:
    dim = x.shape[-1]
    angles = (positions[:, None] * THETA ** (-torch.arange(0, dim, 2) / dim))[:, None]
    low, high = x.chunk(2, -1)
    return torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), -1)


def z_lab(head: BlockHead, layers: list[int] | None = None) -> dict[str, Any]:
    """z-lab's config.json."""
    nested: dict[str, Any] = {"mask_token_id": head.mask_id, "target_layer_ids": layers or [0, 2, 4]}
    if head.kind == "dflash2":
        nested |= _dflash2(head)
    if head.kind == "domino":
        nested |= {"projector_type": "domino", "pure_draft_prefix_len": head.plain, "shift_label": head.from_anchor}
        nested |= {"emb_dim": head.rank, "gru_hidden_dim": head.state}
    if all(head.causal):
        nested["causal"] = True
    names = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
    nested |= {name: value for name, value in zip(names, head.scales, strict=True) if value not in (1.0, None)}
    return head.layer_config() | {
        "architectures": ["DFlash2DraftModel" if head.kind == "dflash2" else "DFlashDraftModel"],
        "block_size": head.block,
        "num_target_layers": 8,
        "dflash_config": nested,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    }


def jetspec(head: BlockHead) -> dict[str, Any]:
    """JetSpec's config.json: z-lab's with another key for causal blocks."""
    config = z_lab(head)
    config["dflash_config"]["causal_head"] = config["dflash_config"].pop("causal")
    return config


def deepspec(head: BlockHead) -> dict[str, Any]:
    """DeepSpec's config.json, with a Markov head or without."""
    return head.layer_config() | {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": head.block,
        "mask_token_id": head.mask_id,
        "target_layer_ids": [0, 2, 4],
        "markov_rank": head.rank if head.kind == "dspark" else 0,
        "markov_head_type": "gated" if head.gated else "vanilla",
        "enable_confidence_head": head.kind == "dspark",
        "confidence_head_with_markov": True,
        "num_anchors": 512,
    }


def _dflash2(head: BlockHead) -> dict[str, Any]:
    sizes = {"conv_kernel_size": head.taps, "conv_group_size": head.group}
    return sizes | {"selector_rank": head.rank, "selector_top_k": head.candidates}


def speculators(head: BlockHead, layers: list[int] | None = None) -> dict[str, Any]:
    """RedHat's config.json."""
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": head.kind,
        **(
            {"markov_rank": head.rank, "markov_head_type": "gated" if head.gated else "vanilla"}
            if head.kind == "dspark"
            else {}
        ),
        **(_dflash2(head) if head.kind == "dflash2" else {}),
        "draft_vocab_size": head.draft_vocab or head.vocab,
        "block_size": head.block,
        "mask_token_id": head.mask_id,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": layers or [1, 3, 5],
        "sample_from_anchor": head.from_anchor,
        "sliding_window_non_causal": not any(head.causal),
        "speculators_config": {"algorithm": head.kind, "verifier": {"name_or_path": "someone/model"}},
        "transformer_layer_config": head.layer_config(),
    }


def head_for(target: Path, **changes: Any) -> BlockHead:
    """A head of a tiny target of `tests.support.tiny_models`."""
    layers = json.loads((target / "config.json").read_text())["num_hidden_layers"]
    return BlockHead(num_captured=min(3, layers - 1), **changes)


def make_block_head(folder: Path, target: Path, head: BlockHead, copying: bool = False) -> Path:
    """A random DFlash head for `target`. copying: its layers add little, so that the anchor's row predicts what follows
    a token by itself, which for a calm target is right about half the time."""
    config, tensors = json.loads((target / "config.json").read_text()), head.tensors()
    if copying:
        weights = load_file(str(target / "model.safetensors"))
        tensors["norm.weight"] = weights["model.norm.weight"] + ("linear_num_key_heads" in config)  # 1 + w in hybrids
        for i in range(head.layers):
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                tensors[f"layers.{i}.{name}.weight"] *= 0.02
    captured = ([1, 3, 5] if config["num_hidden_layers"] > 5 else [1, 2, 3])[: head.num_captured]
    if head.kind == "domino":
        layers = [layer - 1 for layer in captured]
        layout = z_lab(head, layers) | {"num_target_layers": config["num_hidden_layers"]}
    else:
        layout = speculators(head, captured)
    return save_head(folder, layout, tensors)
