"""Configurations and tensors of published block heads at their real sizes, for tests on the meta device.

Keys and sizes are those of the published config.json, and of readers of these checkpoints: z-lab's and `speculators`'
repositories, vLLM, and ports that list the tensors. Keys that no reader names are left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

META = torch.device("meta")
YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}


@dataclass(frozen=True)
class PublishedBlock:
    """config: config.json. target: name of the target's in tests/deploy/config/published. capture: the target's layers
    whose input is read. depth: tokens that a block drafts. windows: `DecodeBatch.window` by layer. num_tensors: of the
    checkpoint. own_tables: it has embedding and vocabulary head."""

    config: Mapping[str, Any]
    target: str
    method: str
    capture: tuple[int, ...]
    depth: int
    windows: tuple[int | None, ...]
    num_tensors: int
    own_tables: bool = False

    @property
    def layers(self) -> Mapping[str, Any]:
        layers: Mapping[str, Any] = self.config.get("transformer_layer_config", self.config)
        return layers

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the checkpoint's tensors without d2t and t2d, by name."""
        layers, given = self.layers, {**self.config, **self.config.get("dflash_config", {})}
        hidden, mlp, dim, vocab = (
            layers[key] for key in ("hidden_size", "intermediate_size", "head_dim", "vocab_size")
        )
        heads, kv = (layers[f"num_{name}_heads"] * dim for name in ("attention", "key_value"))
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, len(self.capture) * hidden),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        draft_vocab = self.config.get("draft_vocab_size") or vocab
        if self.own_tables:
            shapes |= {"embed_tokens.weight": (vocab, hidden), "lm_head.weight": (draft_vocab, hidden)}
        of_layer = {
            "self_attn.q_proj.weight": (heads, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, heads),
            "self_attn.q_norm.weight": (dim,),
            "self_attn.k_norm.weight": (dim,),
            "mlp.gate_proj.weight": (mlp, hidden),
            "mlp.up_proj.weight": (mlp, hidden),
            "mlp.down_proj.weight": (hidden, mlp),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        if self.method == "dspark":
            rank = given["markov_rank"]
            shapes |= {
                "markov_head.markov_w1.weight": (vocab, rank),
                "markov_head.markov_w2.weight": (draft_vocab, rank),
                "confidence_head.proj.weight": (1, hidden + rank),
                "confidence_head.proj.bias": (1,),
            }
        if self.method == "domino":
            rank, state = given["emb_dim"], given["gru_hidden_dim"]
            shapes |= {
                "prefix_gru.weight_ih_l0": (3 * state, hidden),
                "prefix_gru.weight_hh_l0": (3 * state, state),
                "embed_proj.0.weight": (rank, hidden + state),
                "embed_proj.2.weight": (vocab, rank),
            }
        if self.method == "dflash2":
            rank, taps, groups = given["selector_rank"], given["conv_kernel_size"], hidden // given["conv_group_size"]
            shapes |= {f"candidate_selector.{name}_codebook": (vocab, rank) for name in ("predecessor", "successor")}
            shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
            for name in ("attention_conv", "mlp_conv"):
                of_layer |= {
                    f"{name}.base_kernel": (2, taps, hidden),
                    f"{name}.kernel_projection.weight": (2 * taps * groups, hidden),
                }
        for i in range(layers["num_hidden_layers"]):
            shapes |= {f"layers.{i}.{name}": shape for name, shape in of_layer.items()}
        return shapes

    def tensors(self) -> dict[str, Tensor]:
        """The checkpoint's tensors, on the meta device except the vocabulary."""
        tensors = {name: torch.empty(shape, device=META) for name, shape in self.shapes().items()}
        vocab, draft_vocab = self.layers["vocab_size"], self.config.get("draft_vocab_size")
        if draft_vocab:
            members = torch.arange(draft_vocab) * (vocab // draft_vocab)
            tensors["d2t"] = members - torch.arange(draft_vocab)
            tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, members, True)
        return tensors


def layer(hidden: int, mlp: int, heads: int, kv: int, vocab: int, layers: int = 5, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        **more,
    }


def z_lab(layers: dict[str, Any], target_layers: int, ids: list[int], mask: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 16,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": ids},
        "layer_types": ["full_attention"] * layers["num_hidden_layers"],
        "num_target_layers": target_layers,
        "use_cache": True,
        **layers,
        **more,
    }


LAST_FULL = {
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "sliding_window": 2048,
    "use_sliding_window": True,
    "max_window_layers": 5,
}
QWEN8B = layer(4096, 12288, 32, 8, 151936, rope_theta=1000000, rope_scaling=None, max_position_embeddings=40960)
QWEN27B = layer(5120, 17408, 32, 8, 248320, max_position_embeddings=262144)
GEMMA31B = layer(5376, 10752, 64, 8, 262144, rope_theta=1000000, rope_scaling=None, max_position_embeddings=262144)

BLOCKS = {
    "z-lab/Qwen3-8B-DFlash-b16": PublishedBlock(
        z_lab(QWEN8B, 36, [1, 9, 17, 25, 33], 151669), "Qwen3-8B", "dflash", (2, 10, 18, 26, 34), 15, (None,) * 5, 58
    ),
    "Huang2020/Qwen3-8B-Domino-b16": PublishedBlock(
        z_lab(QWEN8B, 36, [1, 9, 17, 25, 33], 151669, emb_dim=256)
        | {
            "architectures": ["DominoDraftModel"],
            "dflash_config": {
                "mask_token_id": 151669,
                "target_layer_ids": [1, 9, 17, 25, 33],
                "projector_type": "domino",
                "pure_draft_prefix_len": 1,
                "emb_dim": 256,
                "gru_hidden_dim": 1024,
                "shift_label": False,
            },
        },
        "Qwen3-8B",
        "domino",
        (2, 10, 18, 26, 34),
        15,
        (None,) * 5,
        62,
    ),
    "deepseek-ai/dspark_qwen3_8b_block7": PublishedBlock(
        {
            **QWEN8B,
            "architectures": ["Qwen3DSparkModel"],
            "block_size": 7,
            "mask_token_id": 151669,
            "num_target_layers": 36,
            "target_layer_ids": [1, 9, 17, 25, 33],
            "markov_rank": 256,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        },
        "Qwen3-8B",
        "dspark",
        (2, 10, 18, 26, 34),
        7,
        (None,) * 5,
        64,
        own_tables=True,
    ),
    "z-lab/Qwen3.6-27B-DFlash": PublishedBlock(
        z_lab(QWEN27B, 64, [1, 16, 31, 46, 61], 248070, rope_theta=10000000, rope_scaling=None, **LAST_FULL),
        "Qwen3.6-27B",
        "dflash",
        (2, 17, 32, 47, 62),
        15,
        (2048,) * 4 + (None,),
        58,
    ),
    "z-lab/Qwen3.6-35B-A3B-DFlash, YaRN": PublishedBlock(
        z_lab(
            layer(2048, 6144, 32, 4, 248320, layers=8, max_position_embeddings=262144),
            40,
            [1, 10, 19, 28, 37],
            248070,
            rope_theta=10000000,
            rope_scaling={**YARN, "factor": 64.0, "original_max_position_embeddings": 4096},
        ),
        "Qwen3.6-35B-A3B",
        "dflash",
        (2, 11, 20, 29, 38),
        15,
        (None,) * 8,
        91,
    ),
    "z-lab/Qwen3.8-27B-DFlash2": PublishedBlock(
        {
            **QWEN27B,
            "architectures": ["DFlash2DraftModel"],
            "is_causal": False,
            "dflash_config": {
                "block_size": 8,
                "conv_group_size": 16,
                "conv_kernel_size": 2,
                "mask_token_id": 248070,
                "selector_rank": 256,
                "selector_top_k": 16,
                "target_layer_ids": [5, 19, 33, 47, 61],
            },
            "layer_types": ["sliding_attention"] * 5,
            "num_target_layers": 64,
            "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
            "max_window_layers": 5,
            "sliding_window": 2048,
            "use_sliding_window": True,
        },
        "Qwen3.6-27B",
        "dflash2",
        (6, 20, 34, 48, 62),
        7,
        (2055,) * 5,
        81,
    ),
    "RadixArk/Qwen3.8-27B-DSpark, keys twice": PublishedBlock(
        {
            **QWEN27B,
            "architectures": ["DSparkDraftModel"],
            "block_size": 7,
            "markov_rank": 256,
            "mask_token_id": 248070,
            "num_target_layers": 64,
            "target_layer_ids": [5, 19, 33, 47, 61],
            "rope_theta": 10000000,
            "rope_scaling": {**YARN, "factor": 32.0, "original_max_position_embeddings": 8192},
            "dspark_config": {"markov_rank": 256, "mask_token_id": 248070, "target_layer_ids": [5, 19, 33, 47, 61]},
        },
        "Qwen3.6-27B",
        "dspark",
        (6, 20, 34, 48, 62),
        7,
        (None,) * 5,
        62,
    ),
    "z-lab/gemma-4-31B-it-DFlash, capped logits": PublishedBlock(
        z_lab(GEMMA31B, 60, [1, 12, 23, 35, 46, 57], 4, final_logit_softcapping=30.0, **LAST_FULL)
        | {"tie_word_embeddings": True},
        "gemma-4-31B-it",
        "dflash",
        (2, 13, 24, 36, 47, 58),
        15,
        (2048,) * 4 + (None,),
        58,
    ),
    "RedHatAI/gemma-4-31B-it-speculator.dflash, a vocabulary of its own": PublishedBlock(
        {
            "architectures": ["DFlashDraftModel"],
            "aux_hidden_state_layer_ids": [1, 17, 29, 47, 58],
            "block_size": 8,
            "draft_vocab_size": 32000,
            "dtype": "bfloat16",
            "mask_token_id": 4,
            "max_anchors": 3072,
            "speculators_model_type": "dflash",
            "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "google/gemma-4-31B-it"}},
            "target_hidden_size": None,
            "transformer_layer_config": {
                "head_dim": 256,
                "hidden_act": "silu",
                "hidden_size": 5376,
                "intermediate_size": 21504,
                "max_position_embeddings": 262144,
                "model_type": "llama",
                "num_attention_heads": 32,
                "num_hidden_layers": 5,
                "num_key_value_heads": 16,
                "rms_norm_eps": 1e-06,
                "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
                "vocab_size": 262144,
            },
        },
        "gemma-4-31B-it",
        "dflash",
        (1, 17, 29, 47, 58),
        7,
        (None,) * 5,
        62,
        own_tables=True,
    ),
}

# Published heads that are not served -> what the error says.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "deepseek-ai/dspark_gemma4_12b_block7": (
        "gemma-4-31B-it",
        {
            "architectures": ["Gemma4DSparkModel"],
            "model_type": "gemma4_text",
            "hidden_size": 3840,
            "num_attention_heads": 16,
            "num_global_key_value_heads": 1,
            "global_head_dim": 512,
            "intermediate_size": 15360,
            "num_hidden_layers": 5,
            "rms_norm_eps": 1e-6,
            "attention_k_eq_v": True,
            "final_logit_softcapping": 30.0,
            "block_size": 7,
            "mask_token_id": 4,
            "markov_rank": 256,
            "enable_confidence_head": True,
            "target_layer_ids": [5, 17, 29, 41, 46],
            "vocab_size": 262144,
        },
        "is a DeepSpec (Gemma 4's layers) head, which is not served",
    ),
    "nvidia/MiniMax-M3-DSpark": (
        "Qwen3-8B",
        {
            **layer(6144, 16384, 32, 8, 200064, layers=6),
            "architectures": ["Qwen3DSparkModel"],
            "block_size": 8,
            "dflash_config": {
                "mask_token_id": 200063,
                "target_layer_ids": [1, 12, 23, 35, 46, 57],
                "projector_type": "dspark",
                "shift_label": True,
            },
        },
        "dflash_config.projector_type='dspark' is not supported",
    ),
}
