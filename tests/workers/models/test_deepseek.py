"""DeepSeek's architectures: answers equal to transformers', shards, speculation over latent rows, and refusals."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.attention.backends.torch_backend import TorchBackend
from aerie.attention.kv_cache.layout import LatentLayout, LayerGroup
from aerie.attention.kv_cache.pool import KVPool
from aerie.attention.limits import AttentionUse
from aerie.attention.registry import BACKENDS, Choice, choose_backends, limit
from aerie.kernels.capability import Capability
from aerie.kernels.kv.batches import Mode, PrefillBatch
from aerie.workers.config import ModelSource
from aerie.workers.distributed.tp_group import SOLO, TPGroup
from aerie.workers.layers.decoder_layer import DecoderLayer
from aerie.workers.layers.experts_method import UnquantizedExperts, with_room
from aerie.workers.layers.forward_context import make_context
from aerie.workers.layers.moe import Experts
from aerie.workers.layers.rotary import RotaryTable
from aerie.workers.models.deepseek import DeepseekConfig
from aerie.workers.models.loading import read_target_config
from aerie.workers.models.registry import family_of
from tests.support.slow import slow
from tests.support.tiny_models import make_target
from tests.workers.layers.test_moe import check_speculation, load
from tests.workers.models.test_targets import check_greedy

CPU = torch.device("cpu")
V2, V3 = {"architecture": "DeepseekV2"}, {"architecture": "DeepseekV3"}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2, "routed_scaling_factor": 4.0}


@pytest.mark.parametrize(
    "settings",
    [
        V2 | {"q_lora_rank": None, "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
        V2 | GROUPS | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
        V3 | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        *slow(
            V3 | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "num_experts_per_tok": 3},
            V3 | {"norm_topk_prob": False, "first_k_dense_replace": 0, "rope_parameters": YARN | {"beta_fast": 1.0}},
        ),
    ],
    ids=["V2-Lite", "V2", "V3", "Kimi-K2", "V3 of another kind"],
)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, settings: dict[str, Any]) -> None:
    target = make_target(tmp_path / "target", **settings)
    check_greedy(target)


@pytest.mark.parametrize("truncate", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_yarn_is_anyones(tmp_path: Path, truncate: bool) -> None:
    rope = YARN | {"truncate": truncate}
    target = make_target(tmp_path / "target", architecture="Qwen3", rope_parameters=rope, num_hidden_layers=3)
    check_greedy(target)


@pytest.mark.slow  # drafts of a latent target: `tests.speculative.test_fp8_kv`, `tests.speculative.drafts.test_mtp`
def test_speculation_changes_no_token(tmp_path: Path) -> None:
    """The draft keeps K/V heads where its target keeps latent rows; page numbers are the same."""
    check_speculation(tmp_path, make_target(tmp_path / "t", calm=0.01, **V3))


@pytest.mark.parametrize("settings", [V2 | {"q_lora_rank": None}, V3], ids=["V2-Lite", "V3"])
def test_shards_are_the_model(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = make_target(tmp_path / "t", num_hidden_layers=2, **settings)
    whole, halves = load(folder).layers, [load(folder, TPGroup(rank, 2)).layers for rank in range(2)]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    batch = PrefillBatch.from_lists((0,), (5,), torch.tensor([[1, 2]], dtype=torch.int32))

    def attended(layer: DecoderLayer, config: DeepseekConfig) -> torch.Tensor:
        pool = KVPool([LayerGroup((0,), LatentLayout(24, 8, torch.float32))], 2, 4, CPU)
        context = make_context(pool, {Mode.PREFILL: TorchBackend()}, None, None, batch)
        return layer.self_attn.partial(x, RotaryTable(config.rope, 8, 8, CPU).at(context.positions), context)

    config = read_target_config(ModelSource(path=str(folder)), 1)
    assert isinstance(config, DeepseekConfig)
    parts = [attended(half[0], config) for half in halves]
    torch.testing.assert_close(parts[0] + parts[1], attended(whole[0], config))
    for layer in range(2):  # the first has no experts
        parts = [half[layer].mlp.partial(x) for half in halves]
        torch.testing.assert_close(parts[0] + parts[1], whole[layer].mlp.partial(x))


def test_latent_rows_are_whole_on_every_rank(tmp_path: Path) -> None:
    config = read_target_config(ModelSource(path=str(make_target(tmp_path / "t", **V3))), 2)
    groups = [config.kv_groups(size, torch.bfloat16) for size in (1, 2)]
    assert groups[0] == groups[1] and groups[0][0].bytes_per_token == 4 * (24 + 8) * 2


def config_of(tmp_path: Path, **changes: Any) -> DeepseekConfig:
    folder = make_target(tmp_path / "t", **V3, num_hidden_layers=2)
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(raw))
    config = read_target_config(ModelSource(path=str(folder)), raw.get("tp", 1))
    assert isinstance(config, DeepseekConfig)
    return config


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"topk_method": "softer"}, "topk_method='softer' is not supported; it is one of greedy"),
        ({"scoring_func": "tanh"}, "scoring_func='tanh' is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported; only False is"),
        ({"rope_interleave": False}, "rope_interleave=False is not supported"),
        ({"kv_lora_rank": None}, "lacks 'kv_lora_rank', which a DeepseekV3ForCausalLM needs"),
        ({"n_group": 3}, "n_group=3 does not divide the 8 experts"),
        (
            {"architectures": ["DeepseekV2ForCausalLM"], "norm_topk_prob": True},
            "norm_topk_prob=true is not supported in DeepSeek-V2: its published code",
        ),
        ({"tp": 3}, r"tensor_parallel=3: does not divide .*num_attention_heads=4, .*try one of \[1, 2, 4\]"),
    ],
)
def test_what_would_be_ignored_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path, **changes)


def test_layers_without_experts_run_in_float32_on_a_gpu(tmp_path: Path) -> None:
    gpu = Capability("cuda", (9, 0))
    config_of(tmp_path, first_k_dense_replace=4).check_device(gpu, torch.float32, "model x")
    with pytest.raises(ValueError, match="^model x: experts on a GPU are multiplied in bfloat16, not in float32"):
        config_of(tmp_path).check_device(gpu, torch.float32, "model x")


def test_modules_for_drafting_are_not_the_targets(tmp_path: Path) -> None:
    config = config_of(tmp_path, num_nextn_predict_layers=1)
    names = family_of(config.architecture, "model x").weight_names(config)
    assert names.ignores("model.layers.2.eh_proj.weight") and not names.ignores("model.layers.20.mlp.gate.weight")


def test_backends_read_latent_rows_or_are_refused() -> None:
    hopper = Capability("cuda", (9, 0))
    use = AttentionUse(Mode.VERIFY, 16, 1, 576, 64, torch.bfloat16, hopper, True, "latent rows", 512)
    assert limit(BACKENDS["triton"], use) is None
    odd = dataclasses.replace(use, head_dim=56, value_dim=24)
    assert limit(BACKENDS["triton"], odd) == "kv_lora_rank=24: must be a power of two of at least 16"
    wide = dataclasses.replace(use, head_dim=1088, value_dim=1024)
    assert limit(BACKENDS["triton"], wide) == "kv_lora_rank=1024: must be at most 512"
    with pytest.raises(
        ValueError,
        match="trtllm cannot serve verify: latent rows: compute capability 9.0: must be 10.x or 12.x; .*torch",
    ):
        choose_backends([Choice("attention.decode", "trtllm", use)])


def test_shared_experts_have_room_behind_the_others(tmp_path: Path) -> None:
    """In a loaded model: joining them moves no tensor."""
    model = load(make_target(tmp_path / "t", **V3), SOLO)
    methods = [module.method for module in model.modules() if isinstance(module, Experts)]
    for method in methods:
        assert isinstance(method, UnquantizedExperts) and method.shape.num_shared > 0
        for weights in (method.gate_up.data, method.down.data):
            whole = with_room(weights, method.shape.num_shared)
            assert whole.data_ptr() == weights.data_ptr() and torch.equal(whole[: len(weights)], weights)
            assert len(whole) == len(weights) + method.shape.num_shared
            assert with_room(weights.clone(), 1).data_ptr() != weights.data_ptr(), "elsewhere there is none"
    assert methods


def test_dummies_need_no_weights(tmp_path: Path) -> None:
    folder = make_target(tmp_path / "t", **V3, num_hidden_layers=2)
    (folder / "model.safetensors").unlink()
    model = load(folder, SOLO, load_format="dummy")
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
