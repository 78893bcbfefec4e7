"""Hybrids with and without speculation: the same tokens, whatever the shape, chunks, pages, ranks and neighbours; and
after any steps the state of each slot is the recurrence over its tokens."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from torch import Tensor

from aerie.attention.config import CacheConfig
from aerie.kernels.delta_rule import tables
from aerie.kernels.delta_rule.formulas import advanced, convolved, gates, heads_of
from aerie.kernels.delta_rule.tables import TAPS, LayerState
from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import GraphCapture, SchedulerConfig
from aerie.workers.layers.gated_delta_net import GatedDeltaNet
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.scheduling.plan import SamplingParams
from tests.speculative import test_backends as backends_tests
from tests.speculative.conftest import EOS, Pair
from tests.speculative.test_decoding import run
from tests.speculative.test_graphs_while_serving import answers, with_recordings
from tests.support.drafts import fuzzed_requests
from tests.support.drafts.fuzzed_requests import serve_fuzzed
from tests.support.slow import slow
from tests.support.tiny_models import VOCAB, make_eagle, make_eagle3, make_target

TOLERANCE = 2e-4  # of states of magnitude 5: sums of float32 in another order, over up to 100 tokens


def make_pair(folder: object, architecture: str) -> Pair:
    """A hybrid whose EAGLE head is right about half the time; the EAGLE-3 head is random."""
    target = make_target(folder / "target", calm=0.003, architecture=architecture)  # type: ignore[operator]
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 60, (10,), generator=generator).tolist()
    prompts = [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    eagle = make_eagle(folder / "eagle", target, copying=True)  # type: ignore[operator]
    layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}}
    return Pair(target, eagle, make_eagle3(folder / "eagle3", target, **layers), prompts)  # type: ignore[operator]


ARCHITECTURES = ("Qwen3_5", "Qwen3_5Moe", "Qwen3Next")
SAMPLINGS = (
    SamplingParams(24, 0.0, stop_token_ids=(EOS,)),
    SamplingParams(24, 0.0, speculative=False),
    SamplingParams(20, 1.0, seed=5),
    SamplingParams(24, 0.8, top_k=8, frequency_penalty=0.3, seed=1 << 63),
)
CONCURRENCY = 5
DRAFTS = ("tree", "none", "chain and branch", "fixed tree", "tree and branch", "chain")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    made = make_pair(tmp_path_factory.mktemp("hybrid"), "Qwen3_5")
    return replace(made, prompts=made.prompts[:7])


@dataclass(frozen=True)
class Served:
    """A hybrid, what every prompt is answered with each of SAMPLINGS by plain decoding with room for all, and the
    reference of its states."""

    architecture: str
    pair: Pair
    answers: dict[tuple[int, int], list[int]]
    theirs: torch.nn.Module


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    from transformers import AutoModelForCausalLM

    made = make_pair(tmp_path_factory.mktemp("served"), request.param)
    pair = replace(made, prompts=[prompt[:40] for prompt in made.prompts[:6]])
    keys = [(i, k) for i in range(len(pair.prompts)) for k in range(len(SAMPLINGS))]
    with local_engine(pair.spec(None, CacheConfig(16, 300, prefix_cache=False))) as engine:
        prompts, samplings = [pair.prompts[i] for i, _ in keys], [SAMPLINGS[k] for _, k in keys]
        outputs = [each.output for each in engine.generate(prompts, samplings, 6)]
    theirs = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32)
    return Served(request.param, pair, dict(zip(keys, outputs, strict=True)), theirs)


@pytest.fixture(scope="module")
def plain(hybrid: Pair) -> list[list[int]]:
    return [r.output for r in run(hybrid, None)]


@dataclass(frozen=True)
class Setting:
    """Settings of an engine.

    few_pages: too few for all requests, so that some are preempted.
    wide: rounds of trees are wide, and replay all layers at once.
    """

    draft: str
    page_size: int
    chunk: int
    few_pages: bool
    wide: bool
    tensor_parallel: int = 1

    def spec(self, pair: Pair) -> EngineSpec:
        eagle = {"chain": pair.chain(adaptive=False), "tree": pair.tree()}
        eagle["fixed tree"] = replace(eagle["tree"], adaptive=False)
        for name in ("chain", "tree"):  # and a branch that copies the text
            eagle[f"{name} and branch"] = replace(eagle[name], suffix_tokens=6, match_min=1)
        num_pages = max(4, (120 if self.few_pages else 900) // self.page_size)
        cache = CacheConfig(self.page_size, num_pages, state_snapshots=12, state_interval=max(16, self.page_size))
        scheduler = SchedulerConfig(CONCURRENCY, self.chunk)
        return pair.spec(eagle.get(self.draft), cache, scheduler, tensor_parallel=self.tensor_parallel)


@dataclass
class Seen(fuzzed_requests.Seen):
    """resumed: requests that found a saved state. states: compared with the reference. copied: accepted drafts."""

    resumed: int = 0
    states: int = 0
    copied: int = 0


def check_run(served: Served, setting: Setting, rng: Random, seen: Seen, count: int = 10) -> None:
    """Requests that end have the answers of plain decoding; now and then the state of each slot is the recurrence over
    its tokens."""
    steps = itertools.count(1)
    with pytest.MonkeyPatch.context() as patched, local_engine(setting.spec(served.pair)) as engine:
        if setting.wide:
            patched.setattr(tables, "MAX_TILE_ROWS", 8)

        def compare() -> None:
            if setting.tensor_parallel == 1 and next(steps) % 16 == 12:
                seen.states += check_states(engine, served.theirs)

        ended = serve_fuzzed(engine, served.pair.prompts, SAMPLINGS, rng, seen, count, compare)
        seen.copied += engine.scheduler.stats.accepted_by_branch.get("suffix", 0)
    for request, key in ended:
        assert request.output == served.answers[key], f"{setting}: {request}"
        seen.resumed += request.cached_tokens > 0


def settings(seed: int, count: int, tensor_parallel: int = 1) -> Iterator[tuple[Setting, Random]]:
    """All kinds of drafts, sizes of pages and chunks of prompts in turn: from one token to whole prompts."""
    rng, pages, chunks = Random(seed), (4, 1, 16, 64, 2, 8, 32), (3, 16, 1, 64, 7)
    for i in range(seed, seed + count):
        draft, chunk = DRAFTS[i % len(DRAFTS)], chunks[i % len(chunks)]
        few_pages, wide = (i - seed) % 2 == 0, (i - seed) % 3 < 2
        setting = Setting(draft, pages[i % len(pages)], chunk, few_pages, wide, tensor_parallel)
        yield setting, Random(rng.random())


@pytest.mark.parametrize(
    "served, count", [("Qwen3Next", 5), *slow(("Qwen3_5", 24), ("Qwen3_5Moe", 24))], indirect=["served"]
)
def test_answers_and_states_are_those_of_plain_decoding(served: Served, count: int) -> None:
    """Whatever the drafts, pages, chunks, neighbours and aborts, and with states that the prefix cache has saved."""
    seen = Seen()
    for setting, rng in settings(ARCHITECTURES.index(served.architecture), 4):
        check_run(served, setting, rng, seen, count)
    assert min(vars(seen).values()) > 0, f"not all was met: {seen}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("served", ARCHITECTURES, indirect=True)
def test_all_crosses_give_the_answers_of_plain_decoding(served: Served, seed: int) -> None:
    seen = Seen()
    for setting, rng in settings(10 + 28 * seed, 28):
        check_run(served, setting, rng, seen)
    for setting, rng in settings(seed, 3, tensor_parallel=2):
        check_run(served, setting, rng, seen)
    assert min(vars(seen).values()) > 0, f"not all was met: {seen}"


def test_two_ranks_agree_and_give_the_same_tokens(hybrid: Pair, plain: list[list[int]]) -> None:
    requests = run(hybrid, replace(hybrid.tree(), adaptive=True), tensor_parallel=2, measure_costs=True)
    assert [r.output for r in requests] == plain


def test_costs_are_measured_where_no_state_can_be_saved(hybrid: Pair) -> None:
    """A request that replays a row has that row in its text: else a state before its first token is to be saved."""
    spec = hybrid.spec(hybrid.chain(), CacheConfig(16, 100, prefix_cache=False), measure_costs=True)
    with local_engine(spec) as engine:
        assert engine.scheduler.step_time is not None


def test_a_head_may_read_layers_of_either_kind(hybrid: Pair, plain: list[list[int]]) -> None:
    requests = run(hybrid, SpeculativeConfig(str(hybrid.eagle3), "eagle3", 3, 4, 12))
    assert [r.output for r in requests] == plain


@pytest.mark.slow  # captured rounds of hybrids: `requests.test_state_snapshots`
def test_recorded_steps_answer_as_others(hybrid: Pair) -> None:
    """Rounds and prompts are padded to the sizes of recordings: padding changes no state."""
    spec, prompts = hybrid.spec(replace(hybrid.tree(), adaptive=False)), hybrid.prompts[:6]
    with local_engine(spec) as engine:
        expected = answers(engine, prompts)
    with local_engine(spec) as engine:
        recorder, _ = with_recordings(engine, GraphCapture(limit_s=1e9), sizes=(2, 6))
        assert answers(engine, prompts) == expected
        assert recorder.num_replays > 20


@pytest.mark.parametrize("kind", ["plain", "tree"])
def test_a_round_reads_nothing_on_the_host(hybrid: Pair, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device; the operations' references, which may read, are left out."""
    monkeypatch.setattr("aerie.attention.recurrent.pool.delta_rule_rounds", lambda *given: None)
    monkeypatch.setattr("aerie.attention.recurrent.pool.commit_rows", lambda *given: None)
    backends_tests.test_a_round_reads_nothing_on_the_host(hybrid, kind, True)


def check_states(engine: LocalEngine, theirs: torch.nn.Module) -> int:
    """Compare the state of every slot with a request, once all steps are over; how many there were."""
    while engine.executor.num_pending:
        engine.scheduler.apply(engine.executor.take())
    queues, strategy = engine.scheduler.queues, engine.executor._strategy  # type: ignore[attr-defined]
    model, states, table = strategy._target.model, strategy._target.states, strategy._slots
    prompts = set(queues.prefilling.values())
    for slot, sequence in queues.by_slot.items():
        known = sequence.known_tokens()
        length = sequence.computed if sequence in prompts else int(table.seq_len[slot])
        assert sequence in prompts or length == len(known) - 1
        tokens = known[:length].tolist()
        for layer, expected in recurrences(theirs, tokens) if length else ():
            core = model.layers[layer].self_attn
            torch.testing.assert_close(settled(core, states.layer(layer), slot), expected, atol=TOLERANCE, rtol=1e-4)
    return len(queues.by_slot)


def settled(module: GatedDeltaNet, kept: LayerState, slot: int) -> Tensor:
    """[Hv, dk, dv]: the state after the committed rows of a slot, token by token."""
    heads, weights, state = kept.heads, module.core.weights, kept.state[slot]
    rows = kept.committed[slot, : int(kept.count[slot])]
    channels = torch.cat((kept.conv[slot], rows[:, : heads.channels]))
    b, a = rows[:, heads.channels :].split(heads.value_heads, -1)[:2]
    for i in range(rows.shape[0]):
        _, k, v = heads_of(convolved(channels[i : i + TAPS], weights, torch.float32), heads, torch.float32)
        state = advanced(state, k, v, *gates(b[i], a[i], weights, torch.float32))
    return state


def recurrences(theirs: torch.nn.Module, tokens: list[int]) -> Iterator[tuple[int, Tensor]]:
    """Each recurrent layer's state after `tokens`, by transformers."""
    with torch.no_grad():
        cache = theirs(torch.tensor([tokens]), use_cache=True).past_key_values
    for i, layer in enumerate(cache.layers):
        if hasattr(layer, "recurrent_states"):
            yield i, layer.recurrent_states[0][0]
