"""Log-probabilities of prompts: those of transformers, whatever the chunks, the ranks, the draft and the cache."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from aerie.attention.config import CacheConfig
from aerie.speculative.build import local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers import sampling as sampling_module
from aerie.workers.config import SchedulerConfig
from aerie.workers.layers.vocab import LMHead
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.scheduling.plan import PromptLogprobs, SamplingParams, unpack_i32
from aerie.workers.scheduling.request import Request, RequestOutput
from tests.speculative.conftest import Pair
from tests.support.slow import slow

TOP = 3
ASKING = SamplingParams(6, 0.0, prompt_logprobs=TOP)
# Both sides are float32; their sums over 64 and 96 numbers differ in the last bits, of values up to about 10.
TOLERANCE = 2e-4

Rows = dict[int, tuple[float, int, list[int], list[float]]]  # by position: log-probability, rank, top ids, top


def floats(raw: bytes) -> npt.NDArray[np.float32]:
    return np.frombuffer(raw, "<f4")


def rows_of(part: PromptLogprobs, k: int = TOP) -> Rows:
    logprobs, ranks = floats(part.logprobs).tolist(), unpack_i32(part.ranks).tolist()
    ids = unpack_i32(part.top_ids).reshape(-1, k).tolist()
    top = floats(part.top_logprobs).reshape(-1, k).tolist()
    return {part.start + i: row for i, row in enumerate(zip(logprobs, ranks, ids, top, strict=True))}


def collect(engine: LocalEngine, requests: list[Request], concurrency: int = 4) -> dict[str, Rows]:
    """Return what each request heard of its prompt; what comes again must come equal."""
    found: dict[str, Rows] = {request.request_id: {} for request in requests}
    begun: set[str] = set()

    def listen(output: RequestOutput) -> None:
        if output.prompt_logprobs is not None:
            assert not output.tokens and output.finish_reason is None
            assert output.request.request_id not in begun, "the prompt's come before the first token"
            found[output.request.request_id].update(rows_of(output.prompt_logprobs))
        else:
            begun.add(output.request.request_id)

    engine.run(requests, concurrency, listen)
    return found


def requests_of(prompts: list[list[int]], sampling: SamplingParams = ASKING) -> list[Request]:
    return [Request(f"r{i}", list(prompt), sampling) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected(pair: Pair) -> list[Rows]:
    """The log-probabilities by transformers."""
    model = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()
    rows: list[Rows] = []
    for prompt in pair.prompts:
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(torch.tensor([prompt])).logits[0].float(), -1)
        each: Rows = {}
        for position in range(1, len(prompt)):
            row = logprobs[position - 1]
            own = row[prompt[position]]
            top = row.topk(TOP)
            each[position] = float(own), int((row > own).sum()) + 1, top.indices.tolist(), top.values.tolist()
        rows.append(each)
    return rows


def check(found: dict[str, Rows], expected: list[Rows]) -> None:
    for i, theirs in enumerate(expected):
        ours = found[f"r{i}"]
        assert sorted(ours) == sorted(theirs), "every prompt token but the first has one"
        for position, (logprob, rank, ids, top) in theirs.items():
            own_logprob, own_rank, own_ids, own_top = ours[position]
            assert own_logprob == pytest.approx(logprob, abs=TOLERANCE)
            assert own_top == pytest.approx(top, abs=TOLERANCE)
            assert (own_rank, own_ids) == (rank, ids)


@pytest.mark.parametrize("kind", ["eagle3", *slow("plain", "chain", "tree")])
def test_prompt_logprobs_are_those_of_transformers(pair: Pair, expected: list[Rows], kind: str) -> None:
    speculative = {
        "plain": None,
        "chain": pair.chain(),
        "tree": pair.tree(),
        "eagle3": SpeculativeConfig(str(pair.eagle3)),  # its features are not those of the last layer
    }[kind]
    with local_engine(pair.spec(speculative)) as engine:
        asking = requests_of(pair.prompts)
        check(collect(engine, asking), expected)
        plain = engine.generate(pair.prompts, SamplingParams(6, 0.0))
    assert [r.output for r in asking] == [r.output for r in plain]


def test_two_ranks_give_the_same_prompt_logprobs(pair: Pair, expected: list[Rows]) -> None:
    with local_engine(pair.spec(pair.chain(), tensor_parallel=2)) as engine:
        check(collect(engine, requests_of(pair.prompts[:4])), expected[:4])


@pytest.mark.parametrize("chunk", [7, *slow(1, 512)])
def test_chunks_of_any_size_make_whole_prompts(
    pair: Pair, expected: list[Rows], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of two rows, of which some are cut by the end of a chunk."""
    blocks: list[int] = []
    forward = LMHead.forward

    def watched(self: LMHead, hidden: torch.Tensor) -> torch.Tensor:
        blocks.append(hidden.shape[0])
        return forward(self, hidden)

    monkeypatch.setattr(sampling_module, "BLOCK_BYTES", 2 * 4 * 96)
    monkeypatch.setattr(LMHead, "forward", watched)
    with local_engine(pair.spec(None, scheduler=SchedulerConfig(1, chunk))) as engine:
        check(collect(engine, requests_of(pair.prompts[:4]), 1), expected[:4])
    assert max(blocks) <= 2, "no pass of the head may have more rows than a block"


def test_a_cached_prompt_is_computed_again(pair: Pair, expected: list[Rows]) -> None:
    with local_engine(pair.spec(pair.tree())) as engine:
        engine.generate(pair.prompts, SamplingParams(6, 0.0))
        again = requests_of(pair.prompts)
        check(collect(engine, again), expected)
        assert all(request.cached_tokens == 0 for request in again)
        (cached,) = engine.generate(pair.prompts[:1], SamplingParams(6, 0.0))
        assert cached.cached_tokens > 0, "what was computed again is still shared"


@pytest.mark.slow  # preemption: `tests.speculative.test_decoding`
def test_preempted_prompts_lose_nothing(pair: Pair, expected: list[Rows]) -> None:
    with local_engine(pair.spec(pair.tree(), cache=CacheConfig(4, num_pages=36, prefix_cache=False))) as engine:
        requests = requests_of(pair.prompts, SamplingParams(24, 0.0, prompt_logprobs=TOP))
        check(collect(engine, requests, 8), expected)
    assert sum(r.num_preemptions for r in requests) > 0


def test_a_batch_may_mix_who_asks(pair: Pair, expected: list[Rows]) -> None:
    """With other numbers of most likely tokens, and beside those who ask for nothing."""
    requests = requests_of(pair.prompts)
    for request, k in zip(requests, (-1, 0, 1, 2, 3) * 3, strict=False):
        request.sampling = SamplingParams(6, 0.0, prompt_logprobs=k)
    found: dict[str, list[PromptLogprobs]] = {request.request_id: [] for request in requests}

    def listen(output: RequestOutput) -> None:
        if output.prompt_logprobs is not None:
            found[output.request.request_id].append(output.prompt_logprobs)

    with local_engine(pair.spec(pair.chain())) as engine:
        engine.run(requests, 6, listen)
    for request, theirs in zip(requests, expected, strict=True):
        k, parts = request.sampling.prompt_logprobs, found[request.request_id]
        if k < 0:
            assert parts == []
            continue
        logprobs = [value for part in parts for value in floats(part.logprobs).tolist()]
        ids = [unpack_i32(part.top_ids).reshape(-1, k).tolist() if k else [] for part in parts]
        assert logprobs == pytest.approx([row[0] for row in theirs.values()], abs=TOLERANCE)
        assert sum(ids, []) == ([row[2][:k] for row in theirs.values()] if k else [])


def test_a_prompt_of_one_token_has_none(pair: Pair) -> None:
    with local_engine(pair.spec(pair.chain())) as engine:
        assert collect(engine, requests_of([[5]])) == {"r0": {}}
