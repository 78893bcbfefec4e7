"""Published models for `tests.bench.round`: config.json as in `tests/deploy/config/published`, a floor by bytes, and
block drafts for one of them. Weights are dummies: routers choose by the tokens alone, and spread."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.workers.config import ModelSource
from aerie.workers.distributed.tp_group import SOLO
from aerie.workers.layers.moe import Experts
from aerie.workers.models.llama import LlamaConfig
from aerie.workers.models.loading import allocate, read_target_config
from aerie.workers.models.registry import family_of_config
from aerie.workers.models.weights import META, weight_bytes
from tests.bench.models import hybrids
from tests.deploy.config.test_published_models import PUBLISHED

# Name of the benchmark's model -> of the published configuration.
NAMES = {
    "gpt-oss-20b": "gpt-oss-20b",
    "gpt-oss-120b": "gpt-oss-120b",
    "gemma-3-27b": "gemma-3-27b-it",
    "glm-4.5-air": "GLM-4.5-Air",
    "qwen3-8b": "Qwen3-8B",
}
CONFIGS: dict[str, dict[str, Any]] = {
    name: json.loads((PUBLISHED / f"{file}.json").read_text()) for name, file in NAMES.items()
}
# z-lab's Qwen3-8B-DFlash-b16: five of the target's layers.
DRAFTS: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        **CONFIGS["qwen3-8b"],
        "num_hidden_layers": 5,
        "num_target_layers": 36,
        "layer_types": ["full_attention"] * 5,
        "block_size": 16,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    },
}
# A block of 8 for Qwen3.8-27B, whose head's own config.json is not here: five layers of Qwen3-32B's widths.
_ATTENTION = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 10000000}
for _name, _sizes in {
    "qwen3.8-27b": _ATTENTION | {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5},
    "qwen3.8-tiny": {"num_hidden_layers": 1, "layer_types": ["full_attention"], "num_key_value_heads": 2},
}.items():
    DRAFTS[_name] = {
        **{key: value for key, value in hybrids.CONFIGS[_name].items() if key in CONFIGS["qwen3-8b"]},
        "model_type": "qwen3",
        **_sizes,
        "num_target_layers": hybrids.CONFIGS[_name]["num_hidden_layers"],
        "block_size": 8,
        "dflash_config": {
            "mask_token_id": hybrids.CONFIGS[_name]["vocab_size"] - 1,
            "target_layer_ids": [1, 2] if _name.endswith("tiny") else [1, 16, 31, 46, 61],
        },
    }


# What a kind of head has beside: sizes of the published ones.
BLOCK_DRAFTS: dict[str, dict[str, Any]] = {
    "dflash": {"architectures": ["DFlashDraftModel"]},
    "dspark": {"architectures": ["Qwen3DSparkModel"], "markov_rank": 256, "markov_head_type": "vanilla"},
    "dflash2": {
        "architectures": ["DFlash2DraftModel"],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    },
}


def write_draft(folder: Path, name: str, kind: str = "dflash") -> None:
    """config.json of the model's block draft, if it has one here, in folder/draft. kind: of `BLOCK_DRAFTS`."""
    if name in DRAFTS:
        (folder / "draft").mkdir()
        (folder / "draft" / "config.json").write_text(json.dumps(DRAFTS[name] | BLOCK_DRAFTS[kind]))


def floor_bytes(target: Path, name: str, rows: int, contexts: Sequence[float], num_steps: int) -> float:
    """Bytes that a round must read on one GPU: weights once, of experts those that uniform routing gives to a row, of
    KV what windows say, and a block draft's weights. Embeddings and activations are left out.

    target: folder of the target's config.json; the draft's is beside it.
    rows: of the target's pass.
    contexts: tokens of each request.
    num_steps: drafted levels; 0: nothing is drafted.
    """
    source = ModelSource(path=str(target), load_format="dummy")
    config = read_target_config(source, 1)
    assert isinstance(config, LlamaConfig)
    family = family_of_config(config, name)
    names = family.weight_names(config)
    model = allocate(lambda: family.model(config, SOLO, 4096, META, ()), names, config.quant, torch.bfloat16, META)
    options = GEMMOptions(fp8=True, packed=True)
    experts = sum(m.method.num_bytes(options) for m in model.modules() if isinstance(m, Experts))
    # A tied embedding is the vocabulary head and is read; another is not.
    embedding = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size * 2
    raw = CONFIGS[name].get("text_config", CONFIGS[name])
    total = weight_bytes(model, True) - embedding
    if experts:
        count = raw.get("num_local_experts") or raw["n_routed_experts"]
        total -= round(experts * (1 - raw["num_experts_per_tok"] / count) ** rows)
    windows = [config.score_rule(layer).window for layer in range(config.num_layers)]
    seen = sum(min(tokens, window or tokens) for window in windows for tokens in contexts)
    total += round(2 * 2 * raw["num_key_value_heads"] * raw["head_dim"] * seen)
    if num_steps:
        total += block_draft_bytes(target.parent / "draft", num_steps)
    return float(total)


def block_draft_bytes(folder: Path, num_steps: int) -> int:
    """Bytes of a block draft's weights that a round must read. folder: of its config.json."""
    draft = json.loads((folder / "config.json").read_text())
    hidden, mlp = draft["hidden_size"], draft["intermediate_size"]
    heads = draft["head_dim"] * (2 * draft["num_attention_heads"] + 2 * draft["num_key_value_heads"])
    layers = draft["num_hidden_layers"] * hidden * (heads + 3 * mlp)
    captured = len(draft["dflash_config"]["target_layer_ids"])
    total = 2 * (layers + captured * hidden * hidden + draft["vocab_size"] * hidden)
    # The Markov head's table is read for every level. A selector reads few rows; convolutions project the states.
    total += 2 * num_steps * draft.get("markov_rank", 0) * draft["vocab_size"]
    groups = hidden // draft.get("conv_group_size", hidden)
    return int(total + 2 * draft["num_hidden_layers"] * 2 * 2 * draft.get("conv_kernel_size", 0) * groups * hidden)
