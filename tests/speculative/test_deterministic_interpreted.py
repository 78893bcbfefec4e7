"""A deterministic engine under Triton's interpreter (TRITON_INTERPRET=1), which
`tests/kernels/test_triton_interpreter.py` starts in a process of its own: the target's products and attention are
those of a GPU, in float16, and what is row-wise is torch's."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="triton is not installed here")

from aerie.attention.backends.triton_backend import TritonBackend  # noqa: E402
from aerie.attention.config import CacheConfig  # noqa: E402
from aerie.kernels.delta_rule import recurrence_triton  # noqa: E402
from aerie.kernels.gemm.tiles import ordered_workspace_size  # noqa: E402
from aerie.kernels.gemm.workspace import GEMMOptions, Workspace  # noqa: E402
from aerie.kernels.kv.batches import Mode  # noqa: E402
from aerie.speculative.build import EngineSpec, local_engine  # noqa: E402
from aerie.speculative.config import SpeculativeConfig  # noqa: E402
from aerie.workers.config import SchedulerConfig  # noqa: E402
from aerie.workers.layers.linear import LinearBase  # noqa: E402
from aerie.workers.layers.weighted import WeightedModule  # noqa: E402
from aerie.workers.scheduling.plan import SamplingParams  # noqa: E402
from tests.speculative.conftest import Pair  # noqa: E402
from tests.support.kernels.triton_interpreter import INTERPRETED  # noqa: E402
from tests.support.tiny_models import VOCAB, make_eagle, make_target  # noqa: E402

pytestmark = pytest.mark.skipif(
    not INTERPRETED, reason="tests/speculative/gpu/test_gpu_deterministic.py does it on GPUs"
)

SPAN = 64  # so that short contexts have several
TARGET_MODES = (Mode.PREFILL, Mode.DECODE, Mode.VERIFY)


def wide_pair(folder: Path, lengths: tuple[int, ...], calm: float = 0.1, **settings: object) -> Pair:
    """A target whose products have inputs of 128, with nearly even logits, so that last bits matter; less so with a
    smaller `calm`, with which more drafts are accepted. lengths: of prompts."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32} | settings
    target = make_target(folder / "target", calm=calm, **sizes)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    eagle = make_eagle(folder / "eagle", target, copying=True)
    return Pair(target, eagle, eagle, prompts)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def finish_target(model: nn.Module, deterministic: bool = False) -> None:
        modules = [module for module in model.modules() if isinstance(module, WeightedModule)]
        linear = [module.shape for module in modules if isinstance(module, LinearBase)]
        sizes = [module.workspace_size() for module in modules]
        sizes.append(ordered_workspace_size([(shape.out_features, shape.in_features) for shape in linear]))
        workspace = Workspace.allocate(*(max(each) for each in zip(*sizes, strict=True)), torch.device("cpu"))
        for module in modules:
            module.finish(GEMMOptions(workspace, deterministic, fp8=True))
            module.finished = True

    monkeypatch.setattr("aerie.workers.runner.build.checked_deterministic", lambda worker, *_: worker.deterministic)
    monkeypatch.setattr(
        "aerie.workers.runner.build.target_backends", lambda *_: dict.fromkeys(TARGET_MODES, TritonBackend(SPAN))
    )
    monkeypatch.setattr("aerie.workers.models.loading.finish_weights", finish_target)
    for name in ("delta_rule_rounds", "delta_rule_chunks"):
        monkeypatch.setattr(f"aerie.attention.recurrent.pool.{name}", getattr(recurrence_triton, name))


def spec_of(
    pair: Pair, speculative: SpeculativeConfig | None, max_step_tokens: int, num_pages: int = 100
) -> EngineSpec:
    spec: EngineSpec = pair.spec(
        speculative, CacheConfig(16, num_pages), SchedulerConfig(max_running=3, max_step_tokens=max_step_tokens)
    )
    model = dataclasses.replace(spec.worker.model, dtype="float16")
    return dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, model=model, deterministic=True))


def answers(pair: Pair, speculative: SpeculativeConfig | None, at_once: int, max_step_tokens: int) -> list[list[int]]:
    with local_engine(spec_of(pair, speculative, max_step_tokens)) as engine:
        requests = engine.generate(pair.prompts, SamplingParams(6, 1.0, seed=5), at_once)
        if speculative is not None:
            drafted = torch.tensor([r.acceptance_histogram for r in requests]).sum(0).tolist()
            assert sum(drafted[1:]) > 0, "no draft was accepted, so nothing was shown"
        return [list(request.output) for request in requests]


def test_neither_speculation_nor_company_changes_a_token(tmp_path: Path) -> None:
    pair = wide_pair(tmp_path, (3, 61, 40), num_hidden_layers=2)
    expected = answers(pair, None, 1, 512)
    assert answers(pair, None, 3, 40) == expected
    assert answers(pair, pair.chain(), 3, 40) == expected
    assert answers(pair, pair.tree(), 3, 64) == expected


def test_neither_do_preemptions_nor_the_prefix_cache(tmp_path: Path) -> None:
    """Requests that give their pages back, one of them without speculation, and the same once more from the cache."""
    pair = wide_pair(tmp_path, (47, 44), num_hidden_layers=1)
    drafting = SamplingParams(20, 1.0, seed=5)
    with local_engine(spec_of(pair, None, 512)) as engine:
        expected = [list(request.output) for request in engine.generate(pair.prompts, drafting, 1)]
    with local_engine(spec_of(pair, pair.chain(), 40, num_pages=9)) as engine:
        for _ in range(2):
            sampling = [drafting, SamplingParams(20, 1.0, seed=5, speculative=False)]
            found = engine.generate(pair.prompts, sampling, 2)
            assert [list(request.output) for request in found] == expected
        assert engine.scheduler.stats.num_preemptions > 0 and any(request.cached_tokens for request in found)
