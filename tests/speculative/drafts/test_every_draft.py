"""Every kind of draft beside every kind of target: what the plan accepts starts, and its rounds change no token; the
rest is refused by the plan."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from aerie.attention.config import CacheConfig
from aerie.speculative.build import EngineSpec, check_weights, local_engine, plan_engine
from aerie.speculative.config import Method, SpeculativeConfig
from aerie.speculative.drafts.registry import METHODS
from aerie.workers.config import Implementation, ModelSource, SchedulerConfig, WorkerConfig
from tests.speculative.test_decoding import GREEDY
from tests.support.drafts.block_reference import head_for, make_block_head
from tests.support.known_models import make_known
from tests.support.tiny_models import add_mtp, add_qwen_mtp, make_eagle, make_eagle3, make_target

Make = Callable[[Path], object]  # makes a checkpoint in a folder


class Route(NamedTuple):
    """A way to serve a target: how its checkpoint is made, and its implementation."""

    make: Make
    implementation: Implementation = "auto"


def target(
    architecture: str, calm: float = 0.01, add: Callable[[Path], object] | None = None
) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        make_target(folder, calm=calm, architecture=architecture)
        if add is not None:
            add(folder)

    return make


def known(kind: str) -> Make:
    return lambda folder: make_known(folder, kind)


ROUTES = {
    "own": Route(target("Llama")),
    "adapter": Route(target("Llama"), "transformers"),
    "adapter, scaled logits": Route(known("cohere")),
    "windows": Route(target("Gemma3")),
    "experts": Route(target("Qwen3Moe")),
    "experts, adapter": Route(target("Qwen3Moe"), "transformers"),
    "MiniMax-M2, adapter": Route(known("minimax_m2")),
    "hybrid": Route(target("Qwen3_5", 0.003, add_qwen_mtp)),
    "hybrid of experts": Route(target("Qwen3Next", 0.003, add_qwen_mtp)),
    "latent": Route(target("DeepseekV3", 0.01, add_mtp)),
    "latent, adapter": Route(target("DeepseekV3", 0.01, add_mtp), "transformers"),
}
KINDS: tuple[Method, ...] = ("suffix", "eagle", "eagle3", "mtp", "dflash", "dspark", "dflash2", "domino")
NO_MODULE = "has no module for drafting"
# What the plan refuses, by route and kind. All else starts.
REFUSED = {(route, "mtp"): NO_MODULE for route in ROUTES if not route.startswith(("hybrid", "latent"))}
PROMPTS = [list(range(3, 40)), [5, 6, 7], list(range(20, 30))]
# Block drafts beside the adapter's models, whose vocabulary head is another class than ours.
QUICK = {("adapter", "dflash", 2), ("adapter, scaled logits", "dspark", 1), ("MiniMax-M2, adapter", "dflash2", 1)}
QUICK |= {("adapter", "mtp", 1), ("hybrid", "suffix", 1)}


def draft_for(kind: Method, target: Path, folder: Path) -> SpeculativeConfig:
    """Settings of a random head, which is made in `folder`."""
    if kind in ("suffix", "mtp"):
        return SpeculativeConfig("", kind, 3, 1, 4)
    if kind == "eagle":
        make_eagle(folder, target)
    elif kind == "eagle3":
        make_eagle3(folder, target)
    else:
        head = head_for(target, block=6, from_anchor=kind != "dflash2", kind=kind)
        make_block_head(folder, target, head, copying=True)
    return SpeculativeConfig(str(folder), kind, 3, 2, 8)


def spec_of(route: str, folder: Path, speculative: SpeculativeConfig | None, ranks: int = 1) -> EngineSpec:
    model = ModelSource(str(folder), device="cpu", implementation=ROUTES[route].implementation)
    cache, scheduler = CacheConfig(page_size=4, num_pages=400), SchedulerConfig(max_running=6, max_step_tokens=32)
    worker = WorkerConfig(model, cache, scheduler, tensor_parallel=ranks, measure_costs=False, debug=True)
    return EngineSpec(worker, speculative)


def answers(spec: EngineSpec) -> list[list[int]]:
    """Greedy answers."""
    with local_engine(spec) as engine:
        return [request.output for request in engine.generate(PROMPTS, GREEDY, 4)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[list[int]]]]:
    """The target of a route, and its answers without drafts, made once."""

    @cache
    def of(route: str) -> tuple[Path, list[list[int]]]:
        folder = tmp_path_factory.mktemp("every") / "target"
        ROUTES[route].make(folder)
        return folder, answers(spec_of(route, folder, None))

    return of


ALL = [(route, kind, ranks) for route in ROUTES for kind in KINDS for ranks in (1, 2)]
CASES = [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in ALL]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("route", "kind", "ranks"), CASES)
def test_what_the_plan_accepts_starts_and_changes_no_token(
    plain: Callable[[str], tuple[Path, list[list[int]]]], tmp_path: Path, route: str, kind: Method, ranks: int
) -> None:
    target, expected = plain(route)
    spec = spec_of(route, target, draft_for(kind, target, tmp_path / "draft"), ranks)
    if (route, kind) in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[route, kind]):
            plan_engine(spec)
        return
    check_weights(spec, plan_engine(spec))
    assert answers(spec) == expected


def test_every_kind_of_draft_is_here() -> None:
    assert set(KINDS) == {*METHODS, "suffix"}


def test_a_hybrid_may_have_fewer_pages_than_slots(plain: Callable[[str], tuple[Path, list[list[int]]]]) -> None:
    """Its step times are measured with a token in each slot, also where slots must share pages."""
    target, _ = plain("hybrid")
    spec = spec_of("hybrid", target, None)
    cache = CacheConfig(page_size=16, num_pages=4)
    spec = EngineSpec(replace(spec.worker, cache=cache, measure_costs=True))
    with local_engine(spec) as engine:
        assert len(engine.generate(PROMPTS[1:], GREEDY, 4)) == 2
