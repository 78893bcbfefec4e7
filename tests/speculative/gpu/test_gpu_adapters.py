"""LoRA adapters on a GPU: captured steps equal eager ones and peft's merged models, and places are taken in turns."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from aerie.attention.config import CacheConfig
from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import LoraConfig, ModelSource, SchedulerConfig, WorkerConfig
from aerie.workers.scheduling.plan import SamplingParams
from tests.speculative.gpu.test_gpu import on_gpu
from tests.support import MODELS
from tests.support.embedded import TREE
from tests.support.prompts import held_out_prompts, tokenized
from tests.support.targets.adapters import make_adapter, make_draft_adapter, merged_checkpoints, merged_tokens
from tests.support.tiny_models import VOCAB, make_target

pytestmark = pytest.mark.gpu
NUM_TOKENS = 40
GREEDY = SamplingParams(NUM_TOKENS, 0.0, stop_token_ids=(2,))
RANKS = {"a": 8, "b": 16, "c": 32, "d": 16}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    made = enumerate(RANKS.items())
    return {name: str(make_adapter(folder / name, MODELS / "target", i, 0.2, r=rank)) for i, (name, rank) in made}


def adapted(speculative: SpeculativeConfig | None, graphs: bool, adapters: dict[str, str], dtype: str) -> EngineSpec:
    """Two places for four adapters."""
    spec = on_gpu(speculative, graphs=graphs, dtype=dtype)
    lora = LoraConfig(adapters, max_loras=2, max_lora_rank=32)
    return dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, lora=lora))


def tokens(spec: EngineSpec, prompts: list[list[int]], names: list[str]) -> list[list[int]]:
    with local_engine(spec) as engine:
        requests = engine.generate(prompts, [replace(GREEDY, adapter=name) for name in names], 13)
    return [request.output for request in requests]


@pytest.mark.parametrize("speculative", [None, TREE], ids=["plain", "tree"])
def test_captured_steps_give_the_tokens_of_merged_models(
    speculative: SpeculativeConfig | None, adapters: dict[str, str]
) -> None:
    """In float32; kernels may round the inner products to 10 bits, which changes tokens at near ties."""
    prompts = tokenized(held_out_prompts(20))
    names = [["", *RANKS][i % 5] for i in range(20)]
    expected: list[list[int]] = []
    for name, prompt in zip(names, prompts, strict=True):
        folder = Path(adapters[name]) if name else None
        expected += merged_tokens(MODELS / "target", folder, [prompt], NUM_TOKENS, 2)
    graphed = tokens(adapted(speculative, True, adapters, "float32"), prompts, names)
    eager = tokens(adapted(speculative, False, adapters, "float32"), prompts, names)
    assert sum(a != b for a, b in zip(graphed, eager, strict=True)) <= 2
    assert sum(a == b for a, b in zip(graphed, expected, strict=True)) >= 16


def test_requests_without_adapters_get_the_tokens_of_an_engine_without(adapters: dict[str, str]) -> None:
    """In bfloat16, from the same graphs: bit for bit."""
    prompts = tokenized(held_out_prompts(12))
    plain = on_gpu(TREE)
    assert tokens(adapted(TREE, True, adapters, "bfloat16"), prompts, [""] * 12) == tokens(plain, prompts, [""] * 12)


def test_captured_drafts_of_an_adapted_head_are_those_of_the_merged_head(tmp_path: Path) -> None:
    """Accepted drafts, in float32, beside requests without adapters, whose tokens and drafts do not change. A near tie
    of 10-bit products may change an answer, and what follows in it."""
    adapter = make_draft_adapter(
        make_adapter(tmp_path / "a", MODELS / "target", 5, 0.1, r=16), MODELS / "draft", 6, 0.02, 16
    )
    static = dataclasses.replace(TREE, adaptive=False)
    target, draft = merged_checkpoints(MODELS / "target", MODELS / "draft", adapter, tmp_path / "merged")
    prompts = tokenized(held_out_prompts(12))

    def accepted(spec: EngineSpec, names: list[str]) -> list[float]:
        with local_engine(spec) as engine:
            requests = engine.generate(prompts * 2, [replace(GREEDY, adapter=name) for name in names], 13)
        return [sum(k * n for k, n in enumerate(each.acceptance_histogram)) for each in requests]

    found = accepted(adapted(static, True, {"a": str(adapter)}, "float32"), ["a"] * 12 + [""] * 12)
    merged = on_gpu(dataclasses.replace(static, path=str(draft)), dtype="float32")
    model = dataclasses.replace(merged.worker.model, path=str(target))
    merged = dataclasses.replace(merged, worker=dataclasses.replace(merged.worker, model=model))
    for ours, expected in (
        (found[:12], accepted(merged, [""] * 24)[:12]),
        (found[12:], accepted(on_gpu(static, dtype="float32"), [""] * 24)[:12]),
    ):
        assert sum(a == b for a, b in zip(ours, expected, strict=True)) >= 9
        assert sum(ours) > 0
    base_draft = dataclasses.replace(merged, speculative=static)
    assert accepted(base_draft, [""] * 24)[:12] != found[:12], "the adapter changes the drafts"


LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "head_dim": 16, "v_head_dim": 16}
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "recurrent layers": ({"architecture": "Qwen3_5"}, ("in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "q_proj")),
    "latent attention": (
        {"architecture": "DeepseekV3", "first_k_dense_replace": 4, **LATENT},
        ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_layers_with_adapters_give_the_tokens_of_a_cpu(tmp_path: Path, family: str) -> None:
    """In float32, captured and eager; only near ties may differ."""
    settings, modules = FAMILIES[family]
    target = make_target(tmp_path / "target", calm=0.01, **settings)
    lora = LoraConfig({"a": str(make_adapter(tmp_path / "a", target, 1, target_modules=list(modules)))}, max_loras=2)
    generator, names = torch.Generator().manual_seed(0), ["", "a"] * 6
    prompts = [torch.randint(2, VOCAB, (5 + 7 * i,), generator=generator).tolist() for i in range(12)]
    found = []
    for device, graphs in (("cpu", False), ("cuda", True), ("cuda", False)):
        model = ModelSource(path=str(target), device=device, dtype="float32", max_model_len=200)
        worker = WorkerConfig(model, CacheConfig(16, 300), SchedulerConfig(6, 64), cuda_graphs=graphs, lora=lora)
        found.append(tokens(EngineSpec(worker, None), prompts, names))
    of_cpu, captured, eager = found
    assert of_cpu[::2] != of_cpu[1::2]
    for other in (captured, eager):
        assert sum(a != b for a, b in zip(of_cpu, other, strict=True)) <= 1
