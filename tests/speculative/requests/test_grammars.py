"""Answers that follow a grammar, in process: valid whatever decodes them, and token for token the same with and without
speculation, whatever else their requests ask for.

`python -m tests.speculative.requests.test_grammars 1000` runs so many schemas at 32 streams, decoded plainly, by chains
and by trees, greedy and sampled, and prints how many answers were whole.
"""

import argparse
import dataclasses
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from aerie.attention.config import CacheConfig
from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import GraphCapture
from aerie.workers.distributed.tp_group import SOLO
from aerie.workers.runner.graphs.cuda_graph import GraphedDecoding
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.runner.worker import Worker
from aerie.workers.scheduling.plan import Grammar, SamplingParams
from aerie.workers.scheduling.request import FinishReason, Request, RequestOutput
from tests.support.embedded import CHAIN, TREE, embedded_spec, eos_token_ids
from tests.support.kernels.eager_graphs import LazyRecorder
from tests.support.prompts import held_out_prompts, tokenized
from tests.support.slow import slow
from tests.support.structured_output.sampled import assert_follows, grammar_of, schemas, text_of

SUFFIX = SpeculativeConfig(method="suffix", num_steps=7, num_draft_tokens=8)
SHAPES: dict[str, SpeculativeConfig | None] = {"plain": None, "chain": CHAIN, "tree": TREE, "suffix": SUFFIX}
STOPS = eos_token_ids()
MAX_TOKENS = 40
GREEDY = SamplingParams(MAX_TOKENS, 0.0, stop_token_ids=STOPS)
# what requests ask for beside a grammar; the first two most often
KINDS = (
    GREEDY,
    replace(GREEDY, temperature=0.8, seed=5),
    replace(GREEDY, temperature=1.0, seed=6, top_k=8, top_p=0.9),
    replace(GREEDY, frequency_penalty=0.3, presence_penalty=0.2, logprobs=2),
    replace(GREEDY, temperature=0.7, seed=7, repetition_penalty=1.1, logit_bias={9: 2.0}, min_p=0.02),
)


def requests(all_schemas: Sequence[Any], free_every: int = 0, max_tokens: int = MAX_TOKENS) -> list[Request]:
    """One for each schema, of all kinds in turn; every `free_every`th has no grammar."""
    prompts = tokenized(held_out_prompts(len(all_schemas)))
    found = []
    for i, (prompt, schema) in enumerate(zip(prompts, all_schemas, strict=True)):
        free = free_every and i % free_every == 0
        grammar = None if free else grammar_of(schema)
        sampling = replace(KINDS[i % len(KINDS)], max_tokens=max_tokens, grammar=grammar)
        found.append(Request(f"r{i}", prompt, sampling))
    return found


def run(spec: EngineSpec, asked: list[Request], streams: int = 6) -> list[list[int]]:
    with local_engine(spec) as engine:
        engine.run(asked, streams)
    return [request.output for request in asked]


SCHEMAS = schemas(9)
FEW_TOKENS = 16  # of an answer, where steps are slow: the beginning of what plain decoding answers


@cache
def plainly() -> list[list[int]]:
    """Return what plain decoding answers; every seventh request is free."""
    return run(embedded_spec(None), requests(SCHEMAS, 7))


def test_answers_are_valid() -> None:
    torch.set_num_threads(1)
    whole = 0
    for i, (schema, tokens) in enumerate(zip(SCHEMAS, plainly(), strict=True)):
        whole += i % 7 != 0 and assert_follows(schema, tokens, MAX_TOKENS)
    assert whole > 3


@pytest.mark.parametrize("shape", ["tree", *slow("chain", "suffix")])
def test_speculation_changes_no_token(shape: str) -> None:
    """Greedy and drawn, with filters, penalties and log-probabilities, beside requests that have no grammar."""
    asked = requests(SCHEMAS, 7)
    assert run(embedded_spec(SHAPES[shape]), asked) == plainly()
    # 2.25 and 2.88; drafts that know nothing of grammars give 1.34 and 1.59
    assert acceptance_length(asked) > {"chain": 2.0, "tree": 2.5, "suffix": 1.2}[shape]


def acceptance_length(asked: list[Request]) -> float:
    """Tokens of a round, of requests with a grammar."""
    asked = [request for request in asked if request.sampling.grammar is not None]
    accepted = sum(k * n for request in asked for k, n in enumerate(request.acceptance_histogram))
    return 1 + accepted / max(1, sum(request.num_rounds for request in asked))


@pytest.mark.parametrize("shape", ["chain", *slow("plain", "tree")])
def test_captured_steps_give_the_same_answers(shape: str) -> None:
    """Steps that are cut where masks join, replayed one after the other with those that are not. A request of each
    kind, and trees of few rows: every recording computes all rows of its bucket."""
    small = {"num_steps": 3, "top_k": 2, "num_draft_tokens": 6} if shape == "tree" else {}
    speculative = SHAPES[shape] and dataclasses.replace(SHAPES[shape], adaptive=False, **small)
    with local_engine(embedded_spec(speculative, max_running=4)) as engine:
        recorder = _record(engine)
        asked = requests(SCHEMAS, 7, FEW_TOKENS)[:6]
        engine.run(asked, 4)
    assert [request.output for request in asked] == [tokens[:FEW_TOKENS] for tokens in plainly()[:6]]
    assert recorder.num_replays > 20


def _record(engine: LocalEngine) -> LazyRecorder:
    worker, recorder = engine.executor, LazyRecorder()
    assert isinstance(worker, Worker)
    graphs = GraphedDecoding(worker._strategy, worker._slots, (4,), 512, recorder, (128,))  # type: ignore[arg-type]
    with torch.inference_mode():
        graphs.capture(GraphCapture(1e9, 1e9), SOLO)
    worker._strategy = graphs
    return recorder


def test_ranks_fill_the_same_masks() -> None:
    """Two ranks, which check each other after every step."""
    asked = requests(SCHEMAS, 7, FEW_TOKENS)[:2]
    assert run(embedded_spec(TREE, tensor_parallel=2), asked) == [tokens[:FEW_TOKENS] for tokens in plainly()[:2]]


@pytest.mark.parametrize("shape", ["plain", *slow("tree")])
def test_a_request_goes_on_where_it_was(shape: str) -> None:
    """Resumed after any number of tokens, as after the loss of an engine."""
    asked = requests(SCHEMAS, 7)[1:5]
    expected = plainly()[1:5]
    for i, (request, tokens) in enumerate(zip(asked, expected, strict=True)):
        request.output += tokens[: (i * 7 + 1) % (len(tokens) - 1)]
    assert run(embedded_spec(SHAPES[shape]), asked) == expected


@pytest.mark.slow  # preempted requests go on as resumed ones do
def test_preempted_requests_go_on_where_they_were() -> None:
    spec = embedded_spec(CHAIN, page_size=4)
    pages = CacheConfig(page_size=4, num_pages=100)
    small = EngineSpec(_with_cache(spec, pages), CHAIN)
    asked = requests(SCHEMAS, 7)
    assert run(small, asked, streams=9) == plainly()
    assert sum(request.num_preemptions for request in asked) > 0


def _with_cache(spec: EngineSpec, cache: CacheConfig) -> Any:
    return dataclasses.replace(spec.worker, cache=cache)


OTHERS = [
    (Grammar("regex", "[a-c]{3}-[0-9]{2}", STOPS), lambda text: len(text) == 6 and text[3] == "-"),
    (Grammar("choice", '["yes", "no", "per\\"haps"]', STOPS), lambda text: text in ("yes", "no", 'per"haps')),
    (Grammar("ebnf", 'root ::= "(" root ")" | "x"', STOPS), lambda text: text.strip("()") == "x"),
    (
        Grammar(
            "structural_tag",
            '{"type":"structural_tag","structures":[{"begin":"<f>","schema":{"type":"integer"},"end":"</f>"}],'
            '"triggers":["<f"]}',
            STOPS,
        ),
        lambda text: True,
    ),
]


@pytest.mark.slow  # choices and regular expressions: `test_hostile_grammars`
def test_other_kinds_of_grammar() -> None:
    prompts = tokenized(held_out_prompts(len(OTHERS)))
    outputs = []
    for speculative in (None, TREE):
        asked = [
            Request(f"r{i}", prompt, replace(GREEDY, grammar=grammar))
            for i, (prompt, (grammar, _)) in enumerate(zip(prompts, OTHERS, strict=True))
        ]
        outputs.append(run(embedded_spec(speculative), asked))
    assert outputs[0] == outputs[1]
    for (_, holds), tokens in zip(OTHERS, outputs[0], strict=True):
        assert holds(text_of(tokens)) or len(tokens) == MAX_TOKENS, text_of(tokens)


def test_an_answer_that_cannot_go_on_ends_with_an_error() -> None:
    """One whose text left its grammar before it came here, beside one that is well: it is not continued freely."""
    prompts = tokenized(held_out_prompts(2))
    ends: dict[str, FinishReason] = {}

    def listen(output: RequestOutput) -> None:
        if output.finish_reason is not None:
            ends[output.request.request_id] = output.finish_reason

    good = Request("good", prompts[0], replace(GREEDY, grammar=OTHERS[0][0]))
    resumed = Request("lost", prompts[1], replace(GREEDY, grammar=OTHERS[0][0]), output=[prompts[1][0]])
    with local_engine(embedded_spec(CHAIN)) as engine:
        engine.run([good, resumed], 2, listen)
    assert ends == {"good": FinishReason.STOP, "lost": FinishReason.ERROR}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=1000)
    parser.add_argument("--max-tokens", type=int, default=200, help="of an answer")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    all_schemas, max_tokens = schemas(arguments.count, seed=1), arguments.max_tokens
    expected: list[list[int]] = []
    for name, speculative in SHAPES.items():
        started_s = time.perf_counter()
        asked = requests(all_schemas, max_tokens=max_tokens)
        outputs = run(embedded_spec(speculative, max_running=32, debug=False), asked, streams=32)
        expected = expected or outputs
        whole = sum(assert_follows(s, tokens, max_tokens) for s, tokens in zip(all_schemas, outputs, strict=True))
        equal = sum(a == b for a, b in zip(outputs, expected, strict=True))
        print(
            f"{name}: {whole} valid, {len(outputs) - whole} cut by length, {equal} equal to plain decoding, acceptance "
            f"length {acceptance_length(asked):.2f}, {time.perf_counter() - started_s:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
