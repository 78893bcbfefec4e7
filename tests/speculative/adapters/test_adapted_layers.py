"""Adapters of layers beside grouped-query attention and MLPs, in tiny models of their families: greedy tokens of peft's
merged models, in float32."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.attention.config import CacheConfig
from aerie.speculative.build import EngineSpec, local_engine, plan_engine, plan_weights
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import LoraConfig, SchedulerConfig
from tests.speculative.adapters.conftest import GREEDY, Adapted, Launches, of
from tests.speculative.conftest import EOS, Pair
from tests.support.slow import slow
from tests.support.targets.adapters import experts_without_adapters, make_adapter, merged_tokens
from tests.support.tiny_models import VOCAB, make_eagle, make_target

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")

DEEPSEEK = ("q_b_proj", "q_a_proj", "kv_b_proj", "kv_a_proj_with_mqa", "o_proj")
# Names of the modules that adapters change, by architecture.
MODULES: dict[str, tuple[str, ...]] = {
    "Qwen3_5": (*ATTENTION, *MLP, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    "Qwen3Next": (*ATTENTION, *MLP, "in_proj_qkvz", "in_proj_ba", "out_proj"),
    "Qwen2Moe": (*ATTENTION, *MLP),
    "Glm4Moe": (*ATTENTION, *MLP),
    "DeepseekV3": (*DEEPSEEK, *MLP),
    "DeepseekV2": ("q_proj", *DEEPSEEK[1:], *MLP),
    "Glm4MoeLite": (*DEEPSEEK, *MLP),
    "SmolLM3": (*ATTENTION, *MLP),  # served by transformers' modules
    "Gemma4": (*ATTENTION, *MLP, "per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"),
    "Mixtral": ATTENTION,
    "GraniteMoeShared": (*ATTENTION, "shared_mlp.input_linear", "shared_mlp.output_linear"),
}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Adapted]:
    """Returns what an architecture's tests share, by its name."""
    return functools.cache(lambda architecture: make_family(tmp_path_factory.mktemp("family"), architecture))


def make_family(folder: Path, architecture: str) -> Adapted:
    """A tiny target, an EAGLE head that is often right about its text, and two adapters: one of all layers, and one of
    half of the modules."""
    modules, calm = MODULES[architecture], 0.003 if architecture.startswith(("Qwen3", "Deepseek")) else 1.0
    target = make_target(folder / "target", architecture=architecture, calm=calm)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (43, 5, 30, 17)]
    settings: dict[str, dict[str, Any]] = {
        "all": {"r": 8, "target_modules": list(modules)},
        "half": {"r": 3, "target_modules": list(modules[::2])},
    }
    with experts_without_adapters():
        made = {name: make_adapter(folder / name, target, i, **each) for i, (name, each) in enumerate(settings.items())}
        expected = {
            name: merged_tokens(target, path, prompts, GREEDY.max_tokens, EOS)
            for name, path in {"": None, **made}.items()
        }
    assert len({str(tokens) for tokens in expected.values()}) == len(expected), "each adapter changes the text"
    eagle = make_eagle(folder / "eagle", target, copying=True)
    return Adapted(Pair(target, eagle, folder, prompts), {name: str(path) for name, path in made.items()}, expected)


METHODS: dict[str, SpeculativeConfig | None] = {
    "none": None,
    "suffix": SpeculativeConfig("", "suffix", 3, 1, 4),
    "chain": SpeculativeConfig("eagle", "eagle", 3, 1, 4),
    "tree": SpeculativeConfig("eagle", "eagle", 4, 3, 10),
}


def spec_of(adapted: Adapted, method: str, ranks: int) -> EngineSpec:
    """An engine with both adapters. method: of METHODS."""
    speculative = METHODS[method]
    if speculative is not None and speculative.path:
        speculative = dataclasses.replace(speculative, path=str(adapted.pair.eagle))
    cache, scheduler = CacheConfig(page_size=4, num_pages=160, state_snapshots=16), SchedulerConfig(6, 24)
    spec = adapted.pair.spec(speculative, cache, scheduler, tensor_parallel=ranks)
    return dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, lora=LoraConfig(adapted.adapters, 2)))


@pytest.mark.parametrize(
    ("architecture", "method", "ranks"),
    [
        ("Qwen3_5", "tree", 1),
        ("Qwen3Next", "chain", 2),
        ("DeepseekV3", "tree", 2),
        ("SmolLM3", "none", 1),
        *slow(*(("Qwen3_5", method, ranks) for method in ("none", "suffix", "chain") for ranks in (1, 2))),
        *slow(("Qwen3Next", "none", 1), ("Qwen3Next", "tree", 2)),
        *slow(*((name, "none", 2) for name in ("Glm4Moe", "Glm4MoeLite", "GraniteMoeShared", "Qwen2Moe"))),
        *slow(
            ("DeepseekV3", "none", 1),
            ("DeepseekV3", "suffix", 1),
            ("DeepseekV3", "chain", 2),
            ("DeepseekV2", "tree", 1),
            ("Gemma4", "none", 2),
            ("Mixtral", "suffix", 1),
        ),
    ],
)
def test_all_layers_of_a_family_take_adapters(
    family: Callable[[str], Adapted], architecture: str, method: str, ranks: int
) -> None:
    """Prompts in chunks beside rounds; requests with both adapters and none in one batch, then with none, and then from
    cached pages."""
    adapted = family(architecture)
    pair = adapted.pair
    jobs = [(name, i) for i in range(len(pair.prompts)) for name in ("", "all", "half")]
    accepted = 0
    with local_engine(spec_of(adapted, method, ranks)) as engine:
        for chosen in (jobs, [("", i) for i in range(len(pair.prompts))], jobs[:3]):
            requests = engine.generate([pair.prompts[i] for _, i in chosen], [of(name) for name, _ in chosen])
            assert [request.output for request in requests] == [adapted.expected[name][i] for name, i in chosen]
            accepted += sum(sum(request.acceptance_histogram[1:]) for request in requests)
    assert accepted > 0 or method in ("none", "suffix"), "some drafts are right"


@pytest.mark.parametrize("architecture", ["Qwen3_5", *slow("DeepseekV3", "Gemma4")])
def test_a_start_launches_the_kernels_of_all_layers(
    family: Callable[[str], Adapted], launches: Launches, architecture: str
) -> None:
    adapted = family(architecture)
    with local_engine(spec_of(adapted, "none", 1)) as engine:
        launches.phase = "step"
        engine.generate(adapted.pair.prompts, of("all"))
    assert launches.variants["step"] and launches.variants["start"] >= launches.variants["step"]


def test_the_plan_counts_shared_experts_that_a_gpu_has_twice(tmp_path: Path) -> None:
    """Two in each of three layers; one alone is a view of the joined weights."""
    sizes = []
    for num_shared in (2, 1):
        target = make_target(tmp_path / f"{num_shared}", architecture="DeepseekV2", n_shared_experts=num_shared)
        spec = Pair(target, target, target, []).spec()
        spec = dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, lora=LoraConfig()))
        on_gpu, on_cpu = (plan_weights(spec, plan_engine(spec), has_fp8).target for has_fp8 in (True, False))
        sizes.append(on_gpu - on_cpu)
    assert sizes == [3 * 3 * 64 * (2 * 48) * 4, 0]
