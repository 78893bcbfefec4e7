"""Engines that copy drafts from the requests' own text: the answers are those of plain decoding, for every kind of
target, and the ranks hold the text of each request."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
import torch

from aerie.attention.config import CacheConfig
from aerie.speculative.build import EngineSpec, local_engine, plan_engine, plan_weights
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import GraphCapture, ModelSource, SchedulerConfig, WorkerConfig
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.scheduling.plan import SamplingParams
from tests.speculative import test_backends as backends_tests
from tests.speculative.conftest import EOS, Pair
from tests.speculative.test_graphs_while_serving import with_recordings
from tests.support.drafts import fuzzed_requests
from tests.support.drafts.fuzzed_requests import Key, serve_fuzzed
from tests.support.known_models import make_known
from tests.support.slow import slow
from tests.support.tiny_models import VOCAB, make_target

SUFFIX = SpeculativeConfig(method="suffix", num_steps=15, num_draft_tokens=16)
CONCURRENCY = 5
SLOW = pytest.mark.slow
SAMPLINGS = (
    SamplingParams(40, 0.0, stop_token_ids=(EOS,)),
    SamplingParams(9, 0.0, speculative=False),
    SamplingParams(24, 0.4, seed=5),
    SamplingParams(16, 0.5, top_k=8, frequency_penalty=0.1, seed=1 << 63, logprobs=1),
)


@dataclass(frozen=True)
class Target:
    """A checkpoint, prompts that repeat parts of themselves, and their answers by plain decoding, as far as asked."""

    folder: Path
    prompts: list[list[int]]
    answers: dict[Key, list[int]]

    def answer(self, keys: Sequence[Key]) -> None:
        missing = sorted({*keys} - {*self.answers})
        if not missing:
            return
        with local_engine(spec_of(self.folder, None)) as engine:
            prompts, samplings = [self.prompts[i] for i, _ in missing], [SAMPLINGS[k] for _, k in missing]
            done = engine.generate(prompts, samplings, CONCURRENCY)
        self.answers.update({key: request.output for key, request in zip(missing, done, strict=True)})


def spec_of(
    folder: Path,
    speculative: SpeculativeConfig | None,
    cache: CacheConfig = CacheConfig(16, 300),  # noqa: B008 - frozen
    chunk: int = 64,
    tensor_parallel: int = 1,
    measure_costs: bool = False,
) -> EngineSpec:
    model = ModelSource(path=str(folder), device="cpu", max_model_len=160)
    worker = WorkerConfig(
        model,
        cache,
        SchedulerConfig(CONCURRENCY, chunk),
        tensor_parallel=tensor_parallel,
        measure_costs=measure_costs,
        debug=True,
    )
    return EngineSpec(worker, speculative)


def make(folder: Path, kind: str) -> Path:
    """The first letter of a family of ours is upper case; the others are transformers' decoders."""
    if kind[0].islower():
        return make_known(folder, kind)
    return make_target(folder, calm=0.003 if kind.startswith("Qwen3_5") else 0.01, architecture=kind)


@pytest.fixture(scope="module")
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = make(tmp_path_factory.mktemp("suffix") / "target", request.param)
    rng = Random(3)
    prompts = []
    for length in (1, 9, 30, 55):
        text = [rng.randrange(2, VOCAB) for _ in range(length)]
        prompts.append((text + text[: length // 2])[:70])
    return Target(folder, prompts, {})


@dataclass
class Seen(fuzzed_requests.Seen):
    """texts: compared with the device's."""

    texts: int = 0


def check_run(target: Target, spec: EngineSpec, rng: Random, seen: Seen, count: int = 9) -> None:
    """In rounds of any shape."""
    with local_engine(spec) as engine:
        engine.scheduler.rounds.choose_shape = lambda shapes: rng.randrange(len(shapes))

        def compare() -> None:
            if spec.worker.tensor_parallel == 1:
                seen.texts += check_texts(engine)

        ended = serve_fuzzed(engine, target.prompts, SAMPLINGS, rng, seen, count, compare)
    target.answer([key for _, key in ended])
    for request, key in ended:
        assert request.output == target.answers[key], f"{key}: {request}"
        assert request.num_draft_tokens >= sum(k * n for k, n in enumerate(request.acceptance_histogram))
        assert SAMPLINGS[key[1]].speculative or not request.num_rounds


def check_texts(engine: LocalEngine) -> int:
    """Compare the text that the device holds of each request that decodes; how many there were."""
    table, queues = engine.executor._slots, engine.scheduler.queues  # type: ignore[attr-defined]
    decoding = [(slot, each) for slot, each in queues.by_slot.items() if each not in queues.prefilling.values()]
    for slot, sequence in decoding:
        known = sequence.known_tokens().tolist()
        assert table.tokens[slot, : len(known)].tolist() == known
    return len(decoding)


@pytest.mark.parametrize(
    ("target", "seeds"),
    [
        pytest.param("DeepseekV3", (1,), marks=SLOW),  # latent rows
        pytest.param("Qwen3_5", (1,), marks=SLOW),  # recurrent states
        *(pytest.param(kind, range(2, 8), marks=SLOW) for kind in ("Llama", "Qwen3_5", "DeepseekV3", "olmo2")),
        # windows, sinks, soft caps, experts
        *(pytest.param(kind, (1, 2), marks=SLOW) for kind in ("Gemma2", "Gemma3", "Glm4Moe", "GptOss", "Mistral")),
    ],
    indirect=["target"],
)
def test_answers_are_those_of_plain_decoding(target: Target, seeds: Sequence[int]) -> None:
    """Whatever the shapes, pages, chunks, neighbours, preemptions and aborts."""
    seen = Seen()
    for seed in seeds:
        rng, (page_size, num_pages) = Random(seed), ((16, 60), (4, 34), (1, 140))[seed % 3]
        cache = CacheConfig(page_size, num_pages, state_snapshots=12, state_interval=16)
        check_run(target, spec_of(target.folder, SUFFIX, cache, rng.choice((7, 16, 64))), rng, seen)
    assert min(vars(seen).values()) > 0, f"not all was met: {seen}"


# `test_ranks_agree_on_a_branch` has two ranks that look up the same texts
@pytest.mark.parametrize("target", slow("olmo2", "Qwen3_5"), indirect=True)
def test_two_ranks_agree_and_give_the_same_answers(target: Target) -> None:
    """Each holds the text; what they look up is compared in their answers, after every step."""
    seen = Seen()
    check_run(target, spec_of(target.folder, SUFFIX, tensor_parallel=2), Random(2), seen, count=5)
    assert seen.accepted > 0


@pytest.mark.parametrize("adaptive", [True, *slow(False)])
def test_a_shape_is_chosen_by_costs(pair: Pair, adaptive: bool) -> None:
    speculative = replace(SUFFIX, adaptive=adaptive)
    prompts = [prompt + prompt for prompt in pair.prompts[:4]]
    with local_engine(pair.spec()) as engine:
        expected = [r.output for r in engine.generate(prompts, SamplingParams(40, 0.0))]
    with local_engine(pair.spec(speculative, measure_costs=True)) as engine:
        assert [r.output for r in engine.generate(prompts, SamplingParams(40, 0.0))] == expected
        stats = engine.scheduler.stats
    assert set(stats.steps_by_shape) <= {"plain", "suffix/3", "suffix/7", "suffix/15"}
    assert adaptive or set(stats.steps_by_shape) == {"suffix/15"}
    assert stats.num_draft_tokens >= stats.num_accepted_tokens > 0


def test_recorded_steps_answer_as_others(pair: Pair) -> None:
    """A recorded step looks up texts of any length, and what it drafts is verified by a step of any other shape."""
    prompts = [[5, 6, 7, 8, 9] * 3, [20, 21, 22, 23] * 4, *pair.prompts[:2]]
    sampling = [SamplingParams(40, 0.0), SamplingParams(40, 0.0), SamplingParams(12, 1.0, seed=2), SAMPLINGS[3]]
    with local_engine(pair.spec()) as engine:
        expected = [r.output for r in engine.generate(prompts, sampling, 3)]
    rng = Random(4)
    with local_engine(pair.spec(SUFFIX)) as engine:
        recorder, _ = with_recordings(engine, GraphCapture(limit_s=1e9))
        engine.scheduler.rounds.choose_shape = lambda shapes: rng.choice((0, shapes.default))
        assert [r.output for r in engine.generate(prompts, sampling, 3)] == expected
        assert recorder.num_replays > 20
        accepted = engine.scheduler.stats.num_accepted_tokens
    assert accepted > 8


@pytest.mark.parametrize("kind", ["plain", "suffix"])
def test_a_round_reads_nothing_on_the_host(pair: Pair, kind: str) -> None:
    strategy = backends_tests.strategy_on_meta(pair, SUFFIX)
    shape = 0 if kind == "plain" else strategy.shapes.default
    out = backends_tests.round_of(strategy, shape, random=True)
    assert out.matches is not None and out.matches.shape == (3, 3)


def test_it_takes_no_weights_and_no_kv(pair: Pair) -> None:
    """Only the text of each slot: 4 bytes a token."""
    plain, suffix = pair.spec(), pair.spec(SUFFIX)
    layouts = plan_engine(plain).layout, plan_engine(suffix).layout
    assert layouts[0].bytes_per_page == layouts[1].bytes_per_page
    assert plan_weights(suffix, plan_engine(suffix), False).draft == 0
    table, masks = layouts[1].bytes_per_slot - layouts[0].bytes_per_slot, 15 * -(-VOCAB // 32) * 4
    assert 4 * layouts[1].max_position <= table <= 4 * layouts[1].max_position + 40 * masks


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"match_min": 0}, "match_min=0, match_max=16: must be 1 to 32"),
        ({"match_min": 5, "match_max": 4}, "match_min=5, match_max=4: must be"),
        ({"match_max": 33}, "match_max=33: must be"),
        ({"num_draft_tokens": 8, "num_steps": 4, "top_k": 2}, "top_k=2: method suffix drafts a chain"),
        ({"window": 64}, "window=64: method suffix has no draft model"),
        ({"draft_tp": 1}, "draft_tp=1: method suffix has no draft model"),
        ({"method": "eagle3", "match_max": 4}, "match_max=4: are only for method suffix and suffix_tokens"),
        ({"suffix_tokens": 4}, "suffix_tokens=4: with method suffix it is num_steps"),
        ({"method": "eagle3", "suffix_tokens": 60}, "suffix_tokens=60: must be 0 to 47"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(SUFFIX, **settings)  # type: ignore[arg-type]


def test_texts_of_the_longest_request_fit(pair: Pair) -> None:
    """A request that ends at the model's limit writes its last token inside the table."""
    spec = pair.spec(SUFFIX)
    worker = replace(spec.worker, model=replace(spec.worker.model, max_model_len=64))
    with local_engine(replace(spec, worker=worker)) as engine:
        (request,) = engine.generate([[5, 6] * 12], SamplingParams(40, 0.0), 1)
        assert len(request.output) == 40
        texts = engine.executor._slots.tokens  # type: ignore[attr-defined]
        assert texts.shape[1] > 64 and torch.equal(texts[1:], torch.zeros_like(texts[1:]))


@pytest.mark.parametrize("kind", ["tree", *slow("chain")])
def test_a_branch_beside_a_models_drafts_changes_no_token(pair: Pair, kind: str) -> None:
    """In rounds of any shape, greedy and drawn, with preemptions; some accepted drafts are of either branch."""
    speculative = replace(pair.chain() if kind == "chain" else pair.tree(), suffix_tokens=6, match_min=1)
    prompts = [[5, 6, 7, 8, 9] * 3, [20, 21, 22, 23] * 4, *pair.prompts[:3]]
    sampling = [SAMPLINGS[i % len(SAMPLINGS)] for i in (0, 0, 2, 3, 1)]
    with local_engine(pair.spec()) as engine:
        expected = [r.output for r in engine.generate(prompts, sampling, 4)]
    rng = Random(7)
    with local_engine(pair.spec(speculative, CacheConfig(4, num_pages=44, prefix_cache=False))) as engine:
        assert [shape.width for shape in engine.scheduler._shapes.shapes][-1] == speculative.num_draft_tokens + 6
        engine.scheduler.rounds.choose_shape = lambda shapes: rng.choice((0, 1, *[len(shapes) - 1] * 4))
        requests = engine.generate(prompts, sampling, 4)
        assert [r.output for r in requests] == expected
        accepted = engine.scheduler.stats.accepted_by_branch
        assert sum(accepted.values()) == engine.scheduler.stats.num_accepted_tokens
    assert accepted.keys() == {"eagle", "suffix"} and min(accepted.values()) > 0


def test_ranks_agree_on_a_branch(pair: Pair) -> None:
    speculative = replace(pair.tree(), suffix_tokens=6, adaptive=False)
    prompts = [[5, 6, 7, 8, 9] * 3, pair.prompts[0]]
    answers = []
    for drafts, ranks in ((None, 1), (speculative, 2)):
        with local_engine(pair.spec(drafts, tensor_parallel=ranks)) as engine:
            answers.append([r.output for r in engine.generate(prompts, SamplingParams(24, 0.0), 2)])
    assert answers[0] == answers[1]
