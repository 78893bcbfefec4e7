"""Adapters that the tests share, made once per run."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace
from torch import Tensor

from aerie.attention.config import CacheConfig
from aerie.kernels.lora.product import ROW_LIMITS, LoraTables, add_lora
from aerie.speculative.build import EngineSpec
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import LoraConfig, SchedulerConfig
from aerie.workers.lora import layers
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
    """A pair of target and heads, folders of the target's adapters, and greedy tokens of the pair's prompts, by name of
    the adapter, "" for none."""

    pair: Pair
    adapters: dict[str, str]
    expected: dict[str, list[list[int]]]

    def spec(
        self,
        speculative: SpeculativeConfig | None = None,
        lora: LoraConfig | None = None,
        ranks: int = 1,
        pages: int = 400,
    ) -> EngineSpec:
        """lora: by default with all adapters."""
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
    assert len({str(tokens) for tokens in expected.values()}) == len(expected), "each adapter changes the text"
    return Adapted(pair, {name: str(path) for name, path in made.items()}, expected)


def of(name: str) -> SamplingParams:
    """Greedy sampling with an adapter."""
    return replace(GREEDY, adapter=name)


class Launches:
    """What the start of an engine in this process and its steps call `add_lora` with. A kernel's variant follows the
    layer's tables and the class of the number of rows."""

    def __init__(self) -> None:
        self.phase = "start"
        self.variants: dict[str, set[tuple[Any, ...]]] = {"start": set(), "step": set()}

    def add_lora(self, y: Tensor, x: Tensor, tables: LoraTables, lora_indices: Tensor) -> Tensor:
        rows = sum(x.shape[0] > limit for limit in ROW_LIMITS)
        self.variants[self.phase].add((x.shape[1], y.shape[1], tables.up.shape, tables.parts, x.dtype, rows))
        result: Tensor = add_lora.reference(y, x, tables, lora_indices)
        return result


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    found = Launches()
    monkeypatch.setattr(layers, "add_lora", found.add_lora)
    return found
