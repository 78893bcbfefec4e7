"""LoRA adapters chosen by request: greedy tokens of peft's merged models, in float32."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from aerie.attention.config import CacheConfig
from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import LoraConfig, SchedulerConfig
from aerie.workers.scheduling.plan import SamplingParams
from tests.speculative.conftest import EOS, Pair
from tests.support.targets.adapters import make_adapter, merged_tokens

GREEDY = SamplingParams(12, 0.0, stop_token_ids=(EOS,))
SETTINGS: dict[str, dict[str, Any]] = {
    "small": {"r": 4, "target_modules": "all-linear"},
    "middle": {"use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
    "large": {"r": 64, "lora_alpha": 32, "target_modules": r".*\.[1-3]\.(self_attn\.[kqvo]|mlp\.(up|gate|down))_proj"},
    "mixed": {"rank_pattern": {"down_proj": 16, r"layers\.2\.self_attn\.o_proj": 3}, "alpha_pattern": {"up_proj": 40}},
}


@dataclass(frozen=True)
class Adapted:
    """A pair of target and heads, adapters of the target, and greedy tokens by name of the adapter, "" for none."""

    pair: Pair
    adapters: dict[str, str]
    expected: dict[str, list[list[int]]]

    def spec(
        self, speculative: SpeculativeConfig | None, lora: LoraConfig | None = None, ranks: int = 1, pages: int = 400
    ) -> EngineSpec:
        cache, scheduler = CacheConfig(page_size=4, num_pages=pages), SchedulerConfig(6, 24)
        spec = self.pair.spec(speculative, cache, scheduler, tensor_parallel=ranks)
        lora = lora or LoraConfig(self.adapters, max_lora_rank=64)
        return dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, lora=lora))


@pytest.fixture(scope="session")
def adapted(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    folder = tmp_path_factory.mktemp("adapters")
    made = {
        name: make_adapter(folder / name, pair.target, seed, **settings)
        for seed, (name, settings) in enumerate(SETTINGS.items())
    }
    expected = {
        name: merged_tokens(pair.target, path, pair.prompts, GREEDY.max_tokens, EOS)
        for name, path in {"": None, **made}.items()
    }
    return Adapted(pair, {name: str(path) for name, path in made.items()}, expected)


def of(name: str) -> SamplingParams:
    return replace(GREEDY, adapter=name)


def speculation(pair: Pair, method: str) -> SpeculativeConfig | None:
    suffix = SpeculativeConfig("", "suffix", 3, 1, 4)
    return {"none": None, "chain": pair.chain(), "tree": pair.tree(), "suffix": suffix}[method]


@pytest.mark.parametrize(
    ("method", "ranks"), [("none", 1), ("chain", 1), ("tree", 1), ("suffix", 1), ("none", 2), ("tree", 2)]
)
def test_requests_with_different_adapters_share_steps(adapted: Adapted, method: str, ranks: int) -> None:
    """Pages for few requests, so that some are preempted."""
    names = ["", *SETTINGS]
    assert len({str(tokens) for tokens in adapted.expected.values()}) == len(names), "each adapter changes the text"
    with local_engine(adapted.spec(speculation(adapted.pair, method), ranks=ranks, pages=30)) as engine:
        jobs = [(name, i) for i in range(len(adapted.pair.prompts)) for name in names]
        prompts = [adapted.pair.prompts[i] for _, i in jobs]
        requests = engine.generate(prompts, [of(name) for name, _ in jobs])
        found = {name: [r.output for r, job in zip(requests, jobs, strict=True) if job[0] == name] for name in names}
        assert found == adapted.expected
        assert sum(request.num_preemptions for request in requests) > 0
