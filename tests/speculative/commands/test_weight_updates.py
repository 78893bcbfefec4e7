"""Weights loaded again while an engine runs: texts are those of an engine that was started with them."""

import random
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aerie.attention.config import CacheConfig
from aerie.speculative.build import EngineSpec, local_engine, plan_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import ModelSource, WorkerConfig
from aerie.workers.layers.linear_method import DenseLinearMethod
from aerie.workers.runner.build import build_rank
from aerie.workers.runner.commands import InconsistentRankError
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.scheduling.commands.command import (
    Command,
    CommandAnswer,
    Folder,
    LoadedWeights,
    LoadWeights,
    NamedTensor,
    Tensors,
    first_error,
)
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request
from tests.speculative.conftest import EOS, Pair
from tests.speculative.drafts.test_trained_mtp import MODEL, prompts
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_eagle, make_target

SLOW = [("plain", 2), ("chain", 2), ("tree", 1)]
GREEDY = SamplingParams(20, 0.0, stop_token_ids=(EOS,))


@dataclass(frozen=True)
class Version:
    """One version of the weights: folders of target and draft."""

    target: Path
    eagle: Path

    @property
    def update(self) -> LoadWeights:
        return LoadWeights(Folder(str(self.target)), Folder(str(self.eagle)))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Version:
    """Weights of the pair's dimensions with other values."""
    folder = tmp_path_factory.mktemp("other")
    target = make_target(folder / "target", seed=11, calm=0.01)
    return Version(target, make_eagle(folder / "eagle", target, seed=5, copying=True))


def speculation(pair: Pair, kind: str) -> SpeculativeConfig | None:
    return {"plain": None, "chain": pair.chain(), "tree": pair.tree()}[kind]


def started_with(pair: Pair, version: Version, kind: str, **settings: Any) -> EngineSpec:
    moved = replace(pair, target=version.target, eagle=version.eagle)
    return moved.spec(speculation(moved, kind), **settings)


def load(engine: LocalEngine, work: LoadWeights) -> Sequence[CommandAnswer]:
    answered: list[Sequence[CommandAnswer]] = []
    engine.scheduler.weights.load(work, answered.append)
    while not answered:
        engine.step()
    return answered[0]


def loaded(engine: LocalEngine, work: LoadWeights) -> LoadedWeights:
    answers = load(engine, work)
    assert first_error(answers) == ""
    result = answers[0].result
    assert isinstance(result, LoadedWeights)
    return result


def answers_of(engine: LocalEngine, prompts: list[list[int]], name: str) -> list[tuple[list[int], list[int]]]:
    """Text, and rounds by accepted drafts, of each request alone."""
    requests = [Request(f"{name}-{i}", prompt, GREEDY) for i, prompt in enumerate(prompts)]
    for request in requests:
        engine.run([request], 1)
    return [(request.output, request.acceptance_histogram) for request in requests]


@pytest.mark.parametrize(
    ("kind", "tensor_parallel"),
    [("plain", 1), ("chain", 1), ("tree", 2)] + [pytest.param(*each, marks=pytest.mark.slow) for each in SLOW],
)
def test_an_update_gives_the_texts_and_drafts_of_an_engine_started_with_it(
    pair: Pair, other: Version, kind: str, tensor_parallel: int
) -> None:
    with local_engine(started_with(pair, other, kind)) as engine:
        expected = answers_of(engine, pair.prompts[:4], "b")
    with local_engine(pair.spec(speculation(pair, kind), tensor_parallel=tensor_parallel)) as engine:
        before = answers_of(engine, pair.prompts[:4], "a")
        assert before != expected
        work = other.update if kind != "plain" else LoadWeights(Folder(str(other.target)))
        assert loaded(engine, work).missing == dict.fromkeys(work.sources, ())
        assert answers_of(engine, pair.prompts[:4], "b") == expected
        back = LoadWeights(Folder(str(pair.target)), Folder(str(pair.eagle)) if kind != "plain" else None)
        loaded(engine, back)
        assert answers_of(engine, pair.prompts[:4], "c") == before and engine.scheduler.weights.epoch == 2


@pytest.mark.slow  # with the same embedding and head: the chains and trees above
def test_a_draft_that_all_ranks_hold_follows_its_target(pair: Pair, other: Version) -> None:
    """It has copies of what the ranks of the target share."""
    mixed = replace(pair, target=other.target)
    with local_engine(mixed.spec(mixed.chain(draft_tp=1), tensor_parallel=2)) as engine:
        expected = answers_of(engine, pair.prompts[:3], "b")
    with local_engine(pair.spec(pair.chain(draft_tp=1), tensor_parallel=2)) as engine:
        loaded(engine, LoadWeights(Folder(str(other.target))))
        assert answers_of(engine, pair.prompts[:3], "b") == expected


def test_the_rows_of_a_trimmed_head_follow_the_target(tmp_path: Path) -> None:
    """A trained model with its own module, of which one checkpoint has both."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    weights = load_file(str(folder / "model.safetensors"))
    weights["lm_head.weight"] = weights["lm_head.weight"].roll(7, 1).contiguous()
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})

    def spec(path: Path) -> EngineSpec:
        worker = WorkerConfig(ModelSource(str(path), dtype="float32", device="cpu"), CacheConfig(16, num_pages=64))
        return EngineSpec(worker, SpeculativeConfig("", "mtp", 3, 1, 4, adaptive=False, draft_vocab_size=128))

    with local_engine(spec(folder)) as engine:
        expected = answers_of(engine, prompts()[:2], "b")
    with local_engine(spec(MODEL)) as engine:
        before = answers_of(engine, prompts()[:2], "a")
        source = Folder(str(folder))
        assert loaded(engine, LoadWeights(source, source)).missing == {"target": (), "draft": ()}
        assert answers_of(engine, prompts()[:2], "b") == expected != before


def one_step(engine: LocalEngine) -> None:
    """One plan and its result, so that nothing is in flight."""
    plan = engine.scheduler.schedule()
    assert plan is not None
    engine.executor.submit(plan)
    engine.scheduler.apply(engine.executor.take())


def across(engine: LocalEngine, prompt: list[int], update: Callable[[], object], is_due: Callable[[int], bool]) -> Any:
    """The request's text, and its length at the update, which comes after the step that makes `is_due(length)` true."""
    request, length = Request("across", prompt, replace_tokens(30)), -1
    engine.scheduler.submit(request)
    while engine.scheduler.num_running or engine.scheduler.num_waiting:
        one_step(engine)
        if length < 0 and is_due(len(request.output)):
            length = len(request.output)
            update()
    return request.output, length


def replace_tokens(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens, 0.0)


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_a_running_request_goes_on_with_the_new_weights_as_without_speculation(
    pair: Pair, other: Version, kind: str
) -> None:
    """The oracle exchanges the model between two steps of an engine without speculation: a round commits what such
    steps commit, so both have the same KV of the earlier weights when the new ones come."""
    with local_engine(started_with(pair, other, "plain")) as engine:
        worker: Any = engine.executor
        new_model = worker._strategy._target.model
    for number, prompt in enumerate(pair.prompts[:2]):
        with local_engine(pair.spec(speculation(pair, kind))) as engine:
            text, length = across(
                engine, prompt, lambda: loaded(engine, other.update), lambda n, number=number: n > 3 + 4 * number
            )
        with local_engine(pair.spec()) as engine:
            worker = engine.executor

            def exchange(worker: Any = worker) -> None:
                worker._strategy._target = replace(worker._strategy._target, model=new_model)

            unchanged, _ = across(engine, prompt, lambda: None, lambda n: False)
            expected, _ = across(engine, prompt, exchange, lambda n, length=length: n == length)
        assert text == expected and len(text) == 30
        assert text[:length] == unchanged[:length] and text != unchanged


@pytest.mark.parametrize("kind", ["plain", "chain"])
def test_no_request_uses_cached_pages_of_other_weights(pair: Pair, other: Version, kind: str) -> None:
    """Requests with common prefixes beside updates at random moments. A request that no update meets has the text of
    its weights; had it used a page of the others, it would differ in some."""
    draw = random.Random(4)
    versions = [Version(pair.target, pair.eagle), other]
    shared = pair.prompts[max(range(len(pair.prompts)), key=lambda i: len(pair.prompts[i]))]
    prompts = [shared[: draw.randint(8, len(shared))] + [draw.randint(2, 60) for _ in range(3)] for _ in range(6)]
    texts = []
    for version in versions:
        with local_engine(started_with(pair, version, kind)) as engine:
            texts.append([request.output for request in engine.generate(prompts, GREEDY)])
    assert all(a != b for a, b in zip(*texts, strict=True))
    num_checked = num_cached = 0
    with local_engine(pair.spec(speculation(pair, kind))) as engine:
        begun: dict[str, tuple[int, int, Request]] = {}
        for number in range(260):
            if draw.random() < 0.25:
                index = draw.randrange(len(prompts))
                request = Request(f"r{number}", prompts[index], GREEDY)
                engine.scheduler.submit(request)
                begun[request.request_id] = engine.scheduler.weights.epoch, index, request
            for output in engine.step():
                epoch, index, request = begun[output.request.request_id]
                if output.finish_reason is not None and epoch == engine.scheduler.weights.epoch:
                    assert request.output == texts[epoch % 2][index]
                    num_checked, num_cached = num_checked + 1, num_cached + (request.cached_tokens > 0)
            if number % 65 == 64:
                update = versions[(engine.scheduler.weights.epoch + 1) % 2].update
                loaded(engine, update if kind != "plain" else LoadWeights(update.target))
    assert engine.scheduler.weights.epoch == 4 and num_checked > 10 and num_cached > 5


def test_a_prompt_that_an_update_interrupts_leaves_no_pages_for_later_ones(pair: Pair, other: Version) -> None:
    prompt = max(pair.prompts, key=len)
    with local_engine(started_with(pair, other, "plain")) as engine:
        ((expected, _),) = answers_of(engine, [prompt], "x")
    with local_engine(pair.spec()) as engine:
        first = Request("first", prompt, GREEDY)
        engine.scheduler.submit(first)
        one_step(engine)
        assert not first.output, "its prompt takes more than one chunk"
        loaded(engine, LoadWeights(Folder(str(other.target))))
        while engine.scheduler.num_running:
            engine.step()
        later = [Request(f"later-{i}", prompt, GREEDY) for i in range(2)]
        for request in later:
            engine.run([request], 1)
        assert [request.output for request in later] == [expected] * 2
        assert [request.cached_tokens > 0 for request in later] == [False, True]


def named(name: str, tensor: Tensor, dtype: str = "float32") -> NamedTensor:
    return NamedTensor(name, dtype, tuple(tensor.shape), tensor.contiguous().numpy().tobytes())


NORM, HEAD = "model.norm.weight", "lm_head.weight"


def refusals(pair: Pair, folder: Path) -> Iterator[tuple[LoadWeights, str]]:
    """Sources that do not fit, and a part of each error."""
    weights = load_file(str(pair.target / "model.safetensors"))
    norm = weights[NORM]
    nan = norm.clone()
    nan[3] = float("nan")

    def only(*tensors: NamedTensor) -> LoadWeights:
        return LoadWeights(Tensors(tensors))

    good = named(NORM, norm + 1)
    yield only(good, named(HEAD, weights[HEAD][1:])), r"lm_head.weight \(the message\) has shape"
    yield only(good, named("model.nrom.weight", norm)), r"unexpected: model.nrom.weight"
    yield only(good, named(HEAD, weights[HEAD] * float("inf"))), "NaN, infinite"
    yield only(named(NORM, nan)), "NaN, infinite"
    yield only(good, good), "is there twice"
    yield only(NamedTensor(NORM, "float7", norm.shape, b"")), "dtype 'float7' is not supported"
    yield only(NamedTensor(NORM, "float32", (len(norm),), b"1234")), "4 bytes of data"
    yield only(NamedTensor(NORM, "int32", (len(norm),), bytes(4 * len(norm)))), "is torch.int32"
    yield LoadWeights(Folder(str(folder / "none"))), r"has no \*.safetensors"
    yield LoadWeights(draft=Tensors((good,))), "this engine has no draft"
    shutil.copytree(pair.target, folder / "cut")
    file = folder / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    yield LoadWeights(Folder(str(folder / "cut"))), "is cut off or damaged"
    (folder / "wide").mkdir()
    wide = weights | {"model.layers.0.self_attn.q_proj.weight": torch.ones(4, 4)}
    save_file(wide, str(folder / "wide" / "model.safetensors"))
    yield LoadWeights(Folder(str(folder / "wide"))), r"q_proj.weight \(model.safetensors\) has shape \(4, 4\)"


@pytest.mark.parametrize("tensor_parallel", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_does_not_fit_is_refused_and_changes_nothing(pair: Pair, tmp_path: Path, tensor_parallel: int) -> None:
    prompts = pair.prompts[:1]
    with local_engine(pair.spec(tensor_parallel=tensor_parallel)) as engine:
        before = answers_of(engine, prompts, "a")
        for number, (work, message) in enumerate(refusals(pair, tmp_path)):
            assert re.search(message, first_error(load(engine, work)))
            assert engine.scheduler.weights.epoch == 0
            assert answers_of(engine, prompts, f"b{number}") == before


def test_names_that_a_source_lacks_are_answered_and_keep_their_weights(pair: Pair, other: Version) -> None:
    """Both halves of a checkpoint, one after the other, make a whole one."""
    weights = load_file(str(other.target / "model.safetensors"))
    names = sorted(weights)
    with local_engine(started_with(pair, other, "plain")) as engine:
        expected = answers_of(engine, pair.prompts[:3], "x")
    with local_engine(pair.spec()) as engine:
        for half, rest in ((names[::2], names[1::2]), (names[1::2], names[::2])):
            tensors = Tensors(tuple(named(name, weights[name]) for name in half))
            assert set(loaded(engine, LoadWeights(tensors)).missing["target"]) == set(rest)
        assert answers_of(engine, pair.prompts[:3], "y") == expected


@pytest.mark.parametrize("compiles", [True, False])
def test_weights_that_a_cpu_has_packed_are_packed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiles: bool
) -> None:
    """Kernels for CPUs have weights in their own layout; without a compiler, oneDNN has a copy of those of 2**18
    numbers or more. The head is tied to the embedding."""
    if compiles:
        monkeypatch.setattr("aerie.kernels.gemm.choice._MIN_PACKED_WEIGHTS", 0)  # whole layers are one kernel, too
    else:
        monkeypatch.setattr("aerie.kernels.gemm.workspace.compiles", lambda here: False)
    sizes = {"hidden_size": 512, "intermediate_size": 576, "num_hidden_layers": 1, "tie_word_embeddings": True}
    versions = [make_target(tmp_path / str(seed), seed=seed, vocab_size=512, **sizes) for seed in (0, 1)]
    pairs = [Pair(target, target, target, [[5, 6, 7, 8, 9]]) for target in versions]
    texts = []
    for each in pairs:
        with local_engine(each.spec()) as engine:
            texts.append(answers_of(engine, each.prompts, "a"))
    with local_engine(pairs[0].spec()) as engine:
        worker: Any = engine.executor
        model = worker._strategy._target.model
        kinds = {type(layer.method._gemm).__name__ for layer in (model.layers[0].mlp.gate_up, model.lm_head)}
        assert kinds.isdisjoint({"TorchGEMM"}) and (model.layers[0].host_weights is not None) == compiles
        loaded(engine, LoadWeights(Folder(str(versions[1]))))
        assert answers_of(engine, pairs[0].prompts, "b") == texts[1] != texts[0]
        part = Tensors((named("model.norm.weight", torch.ones(512)),))
        loaded(engine, LoadWeights(part))
        loaded(engine, LoadWeights(Folder(str(versions[1]))))
        assert answers_of(engine, pairs[0].prompts, "c") == texts[1]


def total(model: Any) -> float:
    """The sum of the model's weights."""
    parts = [each.dense_weight() for each in model.modules() if isinstance(each, DenseLinearMethod)]
    return sum(float(each.double().sum()) for each in [*parts, *model.parameters()])


def update_with_a_refusal(rank: int, size: int, address: str, spec: EngineSpec, other: str, stage: str) -> list[object]:
    """One rank refuses in its check, or fails in its load. Return what this rank says, and its weights' sums."""
    built = build_rank(spec.worker, plan_engine(spec), rank, address)
    model = built.worker._strategy._target.model  # type: ignore[attr-defined]
    update: Any = built.worker.handlers._handlers[LoadWeights]
    before = total(model)

    def fail(read: object) -> None:
        raise ValueError("this rank has no memory")

    if rank == 1:
        setattr(update._models["target"], stage, fail)
    try:
        (answer,) = built.worker.carry_out(Command(0, 0, LoadWeights(Folder(other))))
        said = answer.error
    except InconsistentRankError as error:
        said = f"inconsistent: {error}"
    after = total(model)
    return [said, before == after]


@pytest.mark.parametrize("stage", ["check", "load"])
def test_a_rank_that_refuses_alone_changes_no_rank_and_one_that_fails_later_says_so(
    pair: Pair, other: Version, stage: str
) -> None:
    found = run_ranks(update_with_a_refusal, 2, pair.spec(tensor_parallel=2), str(other.target), stage)
    if stage == "check":
        assert found == [["another rank refused these weights", True], ["this rank has no memory", True]]
    else:
        assert found == [["", False], ["inconsistent: weights were loaded in part: this rank has no memory", True]]
