"""Hybrids with and without speculation: the same tokens, whatever the shape, chunks, pages, ranks and neighbours; and
after any steps the state of each slot is the recurrence over its tokens."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention.config import CacheConfig
from attention.ops.delta_rule.formulas import advanced, convolved, gates, heads_of
from attention.ops.delta_rule.tables import TAPS, LayerState
from speculative.config import SpeculativeConfig
from speculative.local import local_engine
from tests.speculative import test_backends as backends_tests
from tests.speculative.conftest import EOS, Pair
from tests.speculative.test_decoding import accepted_share, run
from tests.speculative.test_graphs_while_serving import answers, with_recordings
from tests.support.tiny_models import VOCAB, make_eagle, make_eagle3, make_target
from workers.config import GraphCapture, SchedulerConfig
from workers.layers.gated_delta_net import GatedDeltaNet
from workers.runner.local_engine import LocalEngine
from workers.scheduling.plan import SamplingParams
from workers.scheduling.request import Request

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


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("hybrid"), "Qwen3_5")


@pytest.fixture(scope="module")
def plain(hybrid: Pair) -> list[list[int]]:
    return [r.output for r in run(hybrid, None)]


@pytest.mark.parametrize("page_size,chunk", [(1, 16), (4, 7), (64, 512)])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_greedy_tokens_do_not_change(
    hybrid: Pair, plain: list[list[int]], shape: str, page_size: int, chunk: int
) -> None:
    speculative = hybrid.chain() if shape == "chain" else hybrid.tree()
    cache = CacheConfig(page_size=page_size, num_pages=2400 // page_size)
    requests = run(hybrid, speculative, cache=cache, scheduler=SchedulerConfig(5, chunk))
    assert [r.output for r in requests] == plain
    assert 0.3 < accepted_share(requests) < speculative.num_steps  # some are accepted, and some are not


def test_prompts_may_come_token_by_token(hybrid: Pair, plain: list[list[int]]) -> None:
    requests = run(hybrid, None, scheduler=SchedulerConfig(3, 3))
    assert [r.output for r in requests] == plain


@pytest.mark.parametrize("architecture", ["Qwen3_5Moe", "Qwen3Next"])
def test_experts_change_no_token(tmp_path_factory: pytest.TempPathFactory, architecture: str) -> None:
    pair = make_pair(tmp_path_factory.mktemp("pair"), architecture)
    expected = [r.output for r in run(pair, None)]
    requests = run(pair, pair.tree())
    assert [r.output for r in requests] == expected
    assert accepted_share(requests) > 0.3


def test_two_ranks_agree_and_give_the_same_tokens(hybrid: Pair, plain: list[list[int]]) -> None:
    requests = run(hybrid, replace(hybrid.tree(), adaptive=True), tensor_parallel=2, measure_costs=True)
    assert [r.output for r in requests] == plain


def test_preempted_requests_lose_nothing(hybrid: Pair, plain: list[list[int]]) -> None:
    requests = run(hybrid, hybrid.tree(), cache=CacheConfig(4, num_pages=36))
    assert [r.output for r in requests] == plain
    assert sum(r.num_preemptions for r in requests) > 0


def test_a_head_may_read_layers_of_either_kind(hybrid: Pair, plain: list[list[int]]) -> None:
    requests = run(hybrid, SpeculativeConfig(str(hybrid.eagle3), "eagle3", 3, 4, 12))
    assert [r.output for r in requests] == plain


def test_recorded_steps_answer_as_others(hybrid: Pair) -> None:
    """Rounds and prompts are padded to the sizes of recordings: padding changes no state."""
    spec = hybrid.spec(hybrid.tree())
    with local_engine(spec) as engine:
        expected = answers(engine, hybrid.prompts)
    with local_engine(spec) as engine:
        recorder, _ = with_recordings(engine, GraphCapture(limit_s=1e9))
        assert answers(engine, hybrid.prompts) == expected
        assert recorder.num_replays > 20


@pytest.mark.parametrize("kind", ["plain", "tree"])
def test_a_round_reads_nothing_on_the_host(hybrid: Pair, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device; the operations' references, which may read, are left out."""
    monkeypatch.setattr("attention.recurrent.batch.delta_rule_rounds", lambda *given: None)
    monkeypatch.setattr("attention.recurrent.pool.commit_rows", lambda *given: None)
    backends_tests.test_a_round_reads_nothing_on_the_host(hybrid, kind, True)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(24, 1.0, seed=5), SamplingParams(24, 0.8, top_k=8, frequency_penalty=0.3, seed=9)]
)
def test_sampled_tokens_do_not_change(hybrid: Pair, sampling: SamplingParams) -> None:
    off = run(hybrid, None, sampling)
    on = run(hybrid, hybrid.tree(), sampling, concurrency=6)
    assert [r.output for r in on] == [r.output for r in off]
    assert accepted_share(on) > 0.1


def test_a_batch_may_mix_requests_with_and_without_speculation(hybrid: Pair, plain: list[list[int]]) -> None:
    sampling = [
        SamplingParams(24, 0.0, stop_token_ids=(EOS,), speculative=i % 2 == 0) for i in range(len(hybrid.prompts))
    ]
    requests = run(hybrid, hybrid.tree(), sampling)
    assert [r.output for r in requests] == plain


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2, 3))])
@pytest.mark.parametrize("kind", ["plain", "chain", "tree"])
def test_after_any_steps_a_state_is_the_recurrence_over_its_tokens(hybrid: Pair, kind: str, seed: int) -> None:
    """Requests come, are aborted and preempted at random, in few pages; their finished answers are those of others."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(hybrid.target, dtype=torch.float32)
    speculative = {"plain": None, "chain": hybrid.chain(), "tree": hybrid.tree()}[kind]
    generator = torch.Generator().manual_seed(seed)

    def random(most: int) -> int:
        return int(torch.randint(most, (1,), generator=generator))

    spec = hybrid.spec(speculative, CacheConfig(4, num_pages=36), SchedulerConfig(5, 24))
    submitted: list[Request] = []
    checked, aborted = 0, set[str]()
    with local_engine(spec) as engine:
        for step in range(120):
            if engine.scheduler.num_waiting < 3:
                prompt = hybrid.prompts[random(len(hybrid.prompts))][: 1 + random(40)]
                sampling = SamplingParams(4 + random(30), float(random(2)), seed=random(99), speculative=random(4) > 0)
                submitted.append(Request(str(len(submitted)), prompt, sampling))
                engine.scheduler.submit(submitted[-1])
            if random(12) == 0:
                victim = submitted[-1 - random(min(5, len(submitted)))].request_id
                if engine.scheduler.abort(victim) is not None:
                    aborted.add(victim)
            engine.step()
            if step % 6 == 5:
                checked += check_states(engine, theirs)
        while engine.scheduler.num_running or engine.scheduler.num_waiting:
            engine.step()
    assert checked > 30 and aborted
    assert sum(r.num_preemptions for r in submitted) > 0
    finished = [r for r in submitted if r.request_id not in aborted]
    with local_engine(hybrid.spec()) as engine:
        alone = engine.generate([r.prompt for r in finished], [r.sampling for r in finished], 1)
    assert [r.output for r in finished] == [r.output for r in alone]


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
