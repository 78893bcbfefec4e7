"""Checkpoints that the engine's tests share, made once per run."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from aerie.attention.config import CacheConfig
from aerie.speculative.build import EngineSpec
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import ModelSource, SchedulerConfig, WorkerConfig
from tests.support.ranks import forked_ranks  # noqa: F401 - every test has it
from tests.support.tiny_models import VOCAB, make_eagle, make_eagle3, make_target

EOS, DEEP = 1, 8


@dataclass(frozen=True)
class Pair:
    """A target and its two heads. prompts: of 3 to 60 tokens."""

    target: Path
    eagle: Path
    eagle3: Path
    prompts: list[list[int]]

    def spec(
        self,
        speculative: SpeculativeConfig | None = None,
        cache: CacheConfig = CacheConfig(page_size=4, num_pages=400),  # noqa: B008 - frozen
        scheduler: SchedulerConfig = SchedulerConfig(max_running=6, max_step_tokens=32),  # noqa: B008 - frozen
        tensor_parallel: int = 1,
        measure_costs: bool = False,
        expert_parallel: bool = False,
    ) -> EngineSpec:
        """An engine of this pair that checks that its ranks agree."""
        model = ModelSource(path=str(self.target), device="cpu")
        worker = WorkerConfig(
            model,
            cache,
            scheduler,
            tensor_parallel=tensor_parallel,
            expert_parallel=expert_parallel,
            measure_costs=measure_costs,
            debug=True,
        )
        return EngineSpec(worker, speculative)

    def chain(self, num_steps: int = 3, **settings: object) -> SpeculativeConfig:
        width = num_steps + 1
        return SpeculativeConfig(str(self.eagle), "eagle", num_steps, 1, width, **settings)  # type: ignore[arg-type]

    def tree(self) -> SpeculativeConfig:
        return SpeculativeConfig(str(self.eagle), "eagle", 4, 3, 10)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A Llama target whose EAGLE head is right about half the time; the EAGLE-3 head is random."""
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def deep_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """`pair` with a target of so many layers that a head which names none can read three of them."""
    return make_pair(tmp_path_factory.mktemp("deep_pair"), num_hidden_layers=DEEP)


def make_pair(folder: Path, **settings: int) -> Pair:
    """settings: of the target."""
    target = make_target(folder / "target", calm=0.01, **settings)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 60, (14,), generator=generator)[:8].tolist()
    prompts = [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    eagle = make_eagle(folder / "eagle", target, copying=True)
    return Pair(target, eagle, make_eagle3(folder / "eagle3", target), prompts)
