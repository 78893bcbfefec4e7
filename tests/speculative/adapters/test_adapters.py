"""LoRA adapters chosen by request: greedy tokens of peft's merged models, in float32."""

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.speculative.build import local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import GraphCapture, LoraConfig
from aerie.workers.distributed.tp_group import SOLO
from aerie.workers.runner.graphs.cuda_graph import GraphedDecoding
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.runner.worker import Worker
from aerie.workers.scheduling.request import Request
from tests.speculative.adapters.conftest import SETTINGS, Adapted, Launches, of
from tests.speculative.conftest import Pair
from tests.speculative.test_graphs_while_serving import TOKENS
from tests.support.kernels.eager_graphs import LazyRecorder
from tests.support.slow import slow


def speculation(pair: Pair, method: str) -> SpeculativeConfig | None:
    suffix = SpeculativeConfig("", "suffix", 3, 1, 4)
    return {"none": None, "chain": pair.chain(), "tree": pair.tree(), "suffix": suffix}[method]


def load(engine: LocalEngine, name: str, path: str, replace: bool = False) -> str:
    """Load an adapter beside running requests. Return the error."""
    errors: list[str] = []
    engine.scheduler.adapters.load(name, path, errors.append, replace)
    while not errors:
        engine.step()
    return errors[0]


def tokens(engine: LocalEngine, adapted: Adapted, names: Sequence[str]) -> dict[str, list[list[int]]]:
    """Run all prompts with each adapter, in one batch. Return the tokens by name."""
    jobs = [(name, prompt) for prompt in adapted.pair.prompts for name in names]
    requests = engine.generate([prompt for _, prompt in jobs], [of(name) for name, _ in jobs])
    return {name: [r.output for r, job in zip(requests, jobs, strict=True) if job[0] == name] for name in names}


@pytest.mark.parametrize(
    ("method", "ranks"), [("none", 1), ("chain", 1), ("tree", 1), ("suffix", 1), ("none", 2), ("tree", 2)]
)
def test_requests_with_different_adapters_share_steps(adapted: Adapted, method: str, ranks: int) -> None:
    """Pages for few requests, so that some are preempted."""
    with local_engine(adapted.spec(speculation(adapted.pair, method), ranks=ranks, pages=30)) as engine:
        assert tokens(engine, adapted, ["", *SETTINGS]) == adapted.expected
        assert engine.scheduler.stats.num_preemptions > 0


@pytest.mark.parametrize("method", ["none", "tree"])
def test_captured_steps_serve_all_adapters(adapted: Adapted, method: str) -> None:
    """Recorded steps of requests with adapters, and others without; one capture for all adapters."""
    with local_engine(adapted.spec(speculation(adapted.pair, method))) as engine:
        worker, recorder = engine.executor, LazyRecorder()
        assert isinstance(worker, Worker)
        slots, buckets = worker._slots, (1, 2, 4, 6)
        graphs = GraphedDecoding(worker._strategy, slots, buckets, 256, recorder, TOKENS, has_row_index=True)  # type: ignore[arg-type]
        with torch.inference_mode():
            graphs.capture(GraphCapture(limit_s=1e9), SOLO)
        worker._strategy = graphs
        assert {key.adapted for key in graphs.captured} == {False, True}
        assert tokens(engine, adapted, ["", *SETTINGS]) == adapted.expected
        assert recorder.num_replays > 0


def test_a_start_launches_every_kernel_of_adapters_that_steps_launch(adapted: Adapted, launches: Launches) -> None:
    with local_engine(adapted.spec(adapted.pair.tree())) as engine:
        launches.phase = "step"
        tokens(engine, adapted, ["", "small", "large"])
    launched = launches.variants
    assert launched["step"] and launched["start"] >= launched["step"]
    assert {key[-1] for key in launched["start"]} == {0, 1, 2}


def test_many_adapters_take_turns_in_few_places(adapted: Adapted) -> None:
    """A hundred adapters, four of them different, through four places; twice, so that some return."""
    names = {f"{i}": list(SETTINGS)[i % 4] for i in range(100)}
    lora = LoraConfig({name: adapted.adapters[made] for name, made in names.items()}, 4, 64)
    jobs = [(name, (i + turn) % len(adapted.pair.prompts)) for turn in range(2) for i, name in enumerate(("", *names))]
    with local_engine(adapted.spec(adapted.pair.tree(), lora)) as engine:
        requests = engine.generate([adapted.pair.prompts[i] for _, i in jobs], [of(name) for name, _ in jobs])
    assert [each.output for each in requests] == [adapted.expected[names.get(name, "")][i] for name, i in jobs]


@pytest.mark.parametrize(("method", "ranks"), [("tree", 1), *slow(("none", 2))])
def test_random_loads_beside_random_requests_give_the_tokens_of_the_adapter_of_arrival(
    adapted: Adapted, method: str, ranks: int
) -> None:
    """With few pages, so that cached prefixes of former loads under the same name would be met again."""
    chance, prompts = random.Random(5), adapted.pair.prompts
    lora, expected, errors = LoraConfig({}, 2, 64), list[tuple[Request, list[int]]](), list[str]()
    with local_engine(adapted.spec(speculation(adapted.pair, method), lora, ranks, pages=60)) as engine:
        adapters, loaded = engine.scheduler.adapters, dict[str, str]()

        def load_any(name: str, made: str) -> None:
            def ended(error: str) -> None:
                errors.append(error)
                loaded[name] = made

            if not adapters.is_loading:
                adapters.load(name, adapted.adapters[made], ended, replace=True)

        for turn in range(160):
            name, made, i = chance.choice("abc"), chance.choice(list(SETTINGS)), chance.randrange(len(prompts))
            if turn % 4 == 0:
                load_any(name, made)
            elif turn % 12 == 1 and name in loaded:
                adapters.unload(name)
                del loaded[name]
            elif name in loaded or turn % 5 == 0:
                has = name if name in loaded else ""
                request = Request(f"{turn}", prompts[i], of(has))
                engine.scheduler.submit(request)
                expected.append((request, adapted.expected[loaded.get(has, "")][i]))
            for _ in range(chance.randrange(6)):
                engine.step()
        while engine.scheduler.num_running or engine.scheduler.num_waiting:
            engine.step()
        cached = sum(request.cached_tokens for request, _ in expected)
    assert not any(errors) and len(errors) > 20 and cached > 0
    assert [request.output for request, _ in expected] == [tokens for _, tokens in expected]


def test_pages_are_shared_by_requests_of_one_adapter_only(adapted: Adapted) -> None:
    prompt = max(adapted.pair.prompts, key=len)
    place, full = adapted.pair.prompts.index(prompt), (len(prompt) - 1) // 4 * 4
    with local_engine(adapted.spec(adapted.pair.tree())) as engine:
        for cached in (0, full):
            for name in ("", "small", "large"):
                (request,) = engine.generate([prompt], of(name))
                assert request.output == adapted.expected[name][place]
                assert request.cached_tokens == cached
        assert load(engine, "small", adapted.adapters["large"], replace=True) == ""
        (request,) = engine.generate([prompt], of("small"))
        assert request.cached_tokens == 0, "an adapter that is loaded again shares nothing"
        assert request.output == adapted.expected["large"][place]


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_are_loaded_and_unloaded_beside_running_requests(adapted: Adapted, ranks: int) -> None:
    """A request keeps the adapter of its arrival."""
    prompts = adapted.pair.prompts
    with local_engine(adapted.spec(lora=LoraConfig({}, 1, 64), ranks=ranks)) as engine:
        first = [Request(f"a{i}", prompt, of("")) for i, prompt in enumerate(prompts[:3])]
        for request in first:
            engine.scheduler.submit(request)
        for _ in range(3):
            engine.step()
        assert load(engine, "one", adapted.adapters["small"]) == ""
        with pytest.raises(ValueError, match="is loaded already; unload it, or set load_inplace"):
            load(engine, "one", adapted.adapters["small"])
        second = [Request(f"b{i}", prompt, of("one")) for i, prompt in enumerate(prompts[:3])]
        for request in second:
            engine.scheduler.submit(request)
        for _ in range(3):
            engine.step()
        assert load(engine, "one", adapted.adapters["mixed"], replace=True) == ""
        third = [Request(f"c{i}", prompt, of("one")) for i, prompt in enumerate(prompts[:3])]
        for request in third:
            engine.scheduler.submit(request)
        engine.scheduler.adapters.unload("one")
        with pytest.raises(ValueError, match="adapter=one: is not loaded; loaded: none"):
            engine.scheduler.submit(Request("d", prompts[0], of("one")))
        while engine.scheduler.num_running or engine.scheduler.num_waiting or not engine.scheduler.commands.is_empty:
            engine.step()
        for requests, name in ((first, ""), (second, "small"), (third, "mixed")):
            assert [request.output for request in requests] == adapted.expected[name][:3]
        if isinstance(engine.executor, Worker):
            adapters: Any = engine.executor._batches._adapters
            assert not adapters._host, "adapters that no request has are forgotten"


def test_an_adapter_that_does_not_fit_changes_nothing(adapted: Adapted, tmp_path: Path) -> None:
    broken = shutil.copytree(adapted.adapters["small"], tmp_path / "broken")
    (broken / "adapter_model.safetensors").write_bytes(b"nothing")
    with local_engine(adapted.spec(lora=LoraConfig({"small": adapted.adapters["small"]}, 2), ranks=2)) as engine:
        assert "is cut off or damaged" in load(engine, "broken", str(broken))
        assert "has rank 64, above max_lora_rank=16" in load(engine, "large", adapted.adapters["large"])
        assert "cannot be read" in load(engine, "missing", str(tmp_path / "missing"))
        assert [each.name for each in engine.scheduler.adapters.loaded] == ["small"]
        assert tokens(engine, adapted, ["", "small"]) == {name: adapted.expected[name] for name in ("", "small")}


def test_new_ranks_get_the_adapters_of_the_lost_ones(adapted: Adapted) -> None:
    """New ranks start with the adapters of the configuration; the coordinator then loads the others."""
    lora = LoraConfig({"small": adapted.adapters["small"], "large": adapted.adapters["large"]}, 2, 64)
    spec, prompts = adapted.spec(adapted.pair.tree(), lora), adapted.pair.prompts
    with local_engine(spec) as engine, local_engine(spec) as successor:
        assert load(engine, "later", adapted.adapters["mixed"]) == ""
        engine.scheduler.adapters.unload("large")
        requests = [Request(f"{i}", prompts[i], of(name)) for i, name in enumerate(("later", "small", "later", ""))]
        for request in requests:
            engine.scheduler.submit(request)
        while not any(request.output for request in requests):
            engine.step()
        engine.executor = successor.executor
        engine.scheduler.requeue_all(epoch=1)
        engine.scheduler.adapters.restore()
        while engine.scheduler.num_running or engine.scheduler.num_waiting:
            engine.step()
        expected = [adapted.expected[name][i] for i, name in enumerate(("mixed", "small", "mixed", ""))]
        assert [request.output for request in requests] == expected
