"""The engine with and without speculation: the same tokens, whatever the shape, pages, ranks and neighbours."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from aerie.attention.config import CacheConfig
from aerie.speculative.build import local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import SchedulerConfig
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import FinishReason, Request
from tests.speculative.conftest import EOS, Pair
from tests.support.slow import slow

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, stop_token_ids=(EOS,))


def run(
    pair: Pair,
    speculative: SpeculativeConfig | None,
    sampling: SamplingParams | list[SamplingParams] = GREEDY,
    concurrency: int = 8,
    **settings: object,
) -> list[Request]:
    with local_engine(pair.spec(speculative, **settings)) as engine:  # type: ignore[arg-type]
        requests = engine.generate(pair.prompts, sampling, concurrency)
        assert engine.scheduler.kv_usage == 0
    return requests


def accepted_share(requests: list[Request]) -> float:
    """Accepted draft tokens per round."""
    accepted = sum(k * n for r in requests for k, n in enumerate(r.acceptance_histogram))
    return accepted / sum(sum(r.acceptance_histogram) for r in requests)


@pytest.fixture(scope="module")
def plain(pair: Pair) -> list[list[int]]:
    return [r.output for r in run(pair, None)]


@pytest.mark.parametrize(
    "shape,page_size,chunk",
    [
        ("tree", 1, 7),
        *slow(("chain", 64, 512), ("chain", 1, 7), ("chain", 4, 32), ("tree", 4, 32), ("tree", 64, 512)),
    ],
)
def test_greedy_tokens_do_not_change(
    pair: Pair, plain: list[list[int]], shape: str, page_size: int, chunk: int
) -> None:
    speculative = pair.chain() if shape == "chain" else pair.tree()
    cache = CacheConfig(page_size=page_size, num_pages=2400 // page_size)
    requests = run(pair, speculative, cache=cache, scheduler=SchedulerConfig(5, chunk))
    assert [r.output for r in requests] == plain
    assert accepted_share(requests) > 0.5  # the comparison means nothing if nothing is accepted


def test_greedy_tokens_do_not_change_with_an_eagle3_head(pair: Pair, plain: list[list[int]]) -> None:
    assert [r.output for r in run(pair, SpeculativeConfig(str(pair.eagle3), "eagle3", 3, 4, 12))] == plain


@pytest.mark.parametrize("draft_tp", [1, *slow(2)])
def test_two_ranks_agree_and_give_the_same_tokens(pair: Pair, plain: list[list[int]], draft_tp: int) -> None:
    costly = draft_tp == 1  # what steps cost is compared too, by `RankProcesses`
    few = replace(pair, prompts=pair.prompts[:7])
    requests = run(few, few.chain(draft_tp=draft_tp, adaptive=False), tensor_parallel=2, measure_costs=costly)
    assert [r.output for r in requests] == plain[:7]
    assert accepted_share(requests) > 0.5


def test_preempted_requests_lose_nothing(pair: Pair, plain: list[list[int]]) -> None:
    requests = run(pair, pair.tree(), cache=CacheConfig(4, num_pages=36, prefix_cache=False))
    assert [r.output for r in requests] == plain
    assert sum(r.num_preemptions for r in requests) > 0


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(24, 0.7, top_k=8, top_p=0.9, presence_penalty=0.6, repetition_penalty=1.2, seed=1 << 63),
        *slow(
            SamplingParams(24, 1.0, seed=5),
            SamplingParams(24, 1.3, min_p=0.05, seed=11),
            SamplingParams(24, 0.7, top_k=8, top_p=0.9, seed=1 << 63),
            SamplingParams(24, 0.9, presence_penalty=0.6, frequency_penalty=0.3, repetition_penalty=1.2, seed=3),
            SamplingParams(24, 0.0, logit_bias={7: 3.0, 9: -50.0}, frequency_penalty=0.5),
        ),
    ],
)
@pytest.mark.parametrize("shape", ["tree", *slow("chain")])
def test_sampled_tokens_do_not_change(pair: Pair, shape: str, sampling: SamplingParams) -> None:
    off = run(pair, None, sampling)
    on = run(pair, pair.chain() if shape == "chain" else pair.tree(), sampling, concurrency=6)
    assert [r.output for r in on] == [r.output for r in off]
    assert accepted_share(on) > 0.3


def test_a_batch_may_mix_requests_with_and_without_speculation(pair: Pair, plain: list[list[int]]) -> None:
    sampling = [
        SamplingParams(24, 0.0, stop_token_ids=(EOS,), speculative=i % 2 == 0) for i in range(len(pair.prompts))
    ]
    requests = run(pair, pair.chain(), sampling)
    assert [r.output for r in requests] == plain
    assert all((r.num_rounds > 0) == (i % 2 == 0) for i, r in enumerate(requests) if len(r.output) > 1)


def test_requests_without_speculation_keep_the_drafts_cache_warm(pair: Pair) -> None:
    """A prompt whose beginning was computed by a request that did not speculate is drafted as well as any."""
    off, on = SamplingParams(24, 0.0, speculative=False), SamplingParams(24, 0.0)
    with local_engine(pair.spec(pair.chain())) as engine:
        cold = engine.generate(pair.prompts[:1], on, 1)[0]
    with local_engine(pair.spec(pair.chain())) as engine:
        first = engine.generate(pair.prompts[:1], off, 1)[0]
        warm = engine.generate([first.prompt + first.output[:12]], SamplingParams(12, 0.0), 1)[0]
        assert warm.cached_tokens > 8
    assert warm.output == cold.output[12:]
    assert warm.num_rounds <= cold.num_rounds


def test_the_prefix_cache_changes_no_token(pair: Pair, plain: list[list[int]]) -> None:
    with local_engine(pair.spec(pair.tree())) as engine:
        for turn in range(2):
            requests = engine.generate(pair.prompts, GREEDY, 4)
            assert [r.output for r in requests] == plain
            for request in requests:
                # full pages of the prompt, less those whose last position's next token was not in the prompt
                expected = (len(request.prompt) - 1) // 4 * 4 if turn else 0
                assert request.cached_tokens >= expected


def test_logprobs_do_not_change(pair: Pair) -> None:
    sampling = SamplingParams(12, 0.0, logprobs=3)
    seen = []
    for speculative in (None, pair.chain(), pair.tree()):
        with local_engine(pair.spec(speculative)) as engine:
            logprobs: dict[int, list[tuple[float, tuple[int, ...]]]] = {}
            requests = [Request(str(i), prompt, sampling) for i, prompt in enumerate(pair.prompts[:6])]

            def listen(output: object, into: dict[int, list[tuple[float, tuple[int, ...]]]] = logprobs) -> None:
                items = output.logprobs or ()  # type: ignore[attr-defined]
                into.setdefault(int(output.request.request_id), []).extend((x.logprob, x.top_ids) for x in items)  # type: ignore[attr-defined]

            engine.run(requests, 5, listen)
        assert all(len(logprobs[i]) == len(r.output) for i, r in enumerate(requests))
        for i, request in enumerate(requests):
            assert [x[1][0] for x in logprobs[i]] == request.output
        seen.append([x[0] for i in range(len(requests)) for x in logprobs[i]])
    # float32 logits of magnitude 10 from sums in another order
    assert seen[1] == pytest.approx(seen[0], abs=1e-4) and seen[2] == pytest.approx(seen[0], abs=1e-4)


def test_a_stop_token_ends_an_accepted_run_at_every_offset(pair: Pair, plain: list[list[int]]) -> None:
    cases = [(i, stop) for i, output in enumerate(plain[:2]) for stop in sorted(set(output))]
    sampling = [SamplingParams(24, 0.0, stop_token_ids=(stop,)) for _, stop in cases]
    with local_engine(pair.spec(pair.chain())) as engine:
        requests = engine.generate([pair.prompts[i] for i, _ in cases], sampling, 6)
    for (i, stop), request in zip(cases, requests, strict=True):
        assert request.output == plain[i][: plain[i].index(stop) + 1], (i, stop)


def test_max_tokens_ends_an_accepted_run(pair: Pair) -> None:
    prompts = pair.prompts[:4]
    lengths = [length for length in (1, 2, 3, 4, 5, 9) for _ in prompts]
    with local_engine(pair.spec(pair.chain())) as engine:
        requests = engine.generate(prompts * 6, [SamplingParams(length, 0.0) for length in lengths], 8)
    assert [len(r.output) for r in requests] == lengths


def test_synthetic_acceptance_reaches_its_length(pair: Pair) -> None:
    speculative = pair.chain(synthetic_acceptance_length=2.6)
    requests = run(pair, speculative, SamplingParams(110, 0.0), scheduler=SchedulerConfig(14, 256))
    # about 400 rounds of up to three Bernoulli choices: standard error 0.06 at the most
    assert 1 + accepted_share(requests) == pytest.approx(2.6, abs=0.1)


def test_finish_reasons_are_told(pair: Pair) -> None:
    finished = {}
    with local_engine(pair.spec(pair.chain())) as engine:
        requests = [Request(str(i), p, GREEDY) for i, p in enumerate(pair.prompts)]
        engine.run(requests, 8, lambda o: finished.update({o.request.request_id: o.finish_reason}))
    for request in requests:
        stopped = request.output[-1] == EOS
        assert finished[request.request_id] == (FinishReason.STOP if stopped else FinishReason.LENGTH)


def reference_chain(pair: Pair, tokens: list[int], steps: int) -> list[int]:
    """Draft tokens behind `tokens` by the EAGLE head of the pair, with transformers' target and dense attention over
    everything, one step at a time from the beginning."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32)
    weights = load_file(str(pair.eagle / "model.safetensors"))
    with torch.no_grad():
        out = target(torch.tensor([tokens[:-1]]), output_hidden_states=True)
        hidden = out.hidden_states[-1][0]
        ids = list(tokens[1:])
        for _ in range(steps):
            x = torch.cat((target.model.embed_tokens(torch.tensor(ids)), hidden), dim=-1)
            x = x @ weights["fc.weight"].T + weights["fc.bias"]
            state = reference_layer(x, weights, target)
            hidden = torch.cat((hidden, state[-1:]))
            ids.append(int((state[-1] @ target.lm_head.weight.T).argmax()))
    return ids[-steps:]


def reference_layer(x: Tensor, weights: dict[str, Tensor], target: torch.nn.Module) -> Tensor:
    """EAGLE's one layer on rows 0, 1, ... x [n, hidden], in its textbook form."""
    n = x.shape[0]

    def heads(name: str) -> Tensor:
        return (x @ weights[f"layers.0.self_attn.{name}.weight"].T).view(n, -1, 16).transpose(0, 1)

    cos, sin = target.model.rotary_emb(x, torch.arange(n).unsqueeze(0))  # type: ignore[operator, union-attr]

    def turned(v: Tensor) -> Tensor:
        return v * cos[0] + torch.cat((-v[..., 8:], v[..., :8]), -1) * sin[0]

    q, k, v = turned(heads("q_proj")), turned(heads("k_proj")), heads("v_proj")
    k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
    scores = (q @ k.transpose(1, 2)) / 4 + torch.full((n, n), float("-inf")).triu(1)
    x = x + (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1) @ weights["layers.0.self_attn.o_proj.weight"].T
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weights["layers.0.post_attention_layernorm.weight"]
    gate = torch.nn.functional.silu(y @ weights["layers.0.mlp.gate_proj.weight"].T)
    return x + (gate * (y @ weights["layers.0.mlp.up_proj.weight"].T)) @ weights["layers.0.mlp.down_proj.weight"].T


@pytest.mark.parametrize("shape", ["chain", *slow("tree")])  # trees: `drafts.test_draft_oracle`
def test_drafts_are_those_of_a_draft_computed_from_scratch(pair: Pair, shape: str) -> None:
    """After several rounds, with everything in paged caches, the pending draft equals the textbook one."""
    speculative = pair.chain() if shape == "chain" else pair.tree()
    with local_engine(pair.spec(speculative)) as engine:
        request = Request("r", pair.prompts[2], SamplingParams(80, 0.0))
        engine.scheduler.submit(request)
        for _ in range(25):
            plan = engine.scheduler.schedule()
            assert plan is not None
            engine.executor.submit(plan)
            engine.scheduler.apply(engine.executor.take())
        strategy = engine.executor._strategy  # type: ignore[attr-defined]
        tree = strategy._trees.read(
            torch.tensor([0]), strategy.shapes[strategy.shapes.default], strategy._slots.seq_len
        ).tree
    expected = reference_chain(pair, request.prompt + request.output, speculative.num_steps)
    assert sum(request.acceptance_histogram[1:]) > 0
    paths = [
        [int(tree.tokens[0, j]) for j in range(1, speculative.num_draft_tokens) if int(tree.masks[0, i]) >> j & 1]
        for i in range(speculative.num_draft_tokens)
    ]
    longest = max(paths, key=len)
    if shape == "chain":
        assert longest == expected
    else:  # the greedy chain is in the tree as deep as the tree's budget lets it
        assert max(len(p) for p in paths if p == expected[: len(p)]) >= 2
