"""Speculation changes no token of trained models with their own modules: of DeepSeek-V3's shape (latent attention,
experts in groups whose routers are balanced) and of Qwen3.5's (the state of recurrent layers after chains and trees).

`tests/models/deepseek_tiny` and `hybrid_tiny` were made by `tests.support.targets` (their READMEs say how), with one
tokenizer, so that both have the same prompts. A random model (`test_mtp`) has texts of its own kind and drafts that are
right by construction; here both are learnt.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from aerie.attention.config import CacheConfig
from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.config import Method, SpeculativeConfig
from aerie.workers.config import ModelSource, SchedulerConfig, WorkerConfig
from aerie.workers.runner.graphs.graph_keys import GraphKey
from aerie.workers.runner.graphs.step_capture import CapturedStep
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request
from tests.support import ROOT
from tests.support.prompts import held_out_prompts

MODEL, HYBRID = (ROOT / "tests" / "models" / name for name in ("deepseek_tiny", "hybrid_tiny"))
EOS = 2
SAMPLED = (
    SamplingParams(16, 1.0, seed=5),
    SamplingParams(16, 0.7, top_k=20, top_p=0.9, seed=1 << 63),
    SamplingParams(16, 0.8, frequency_penalty=0.4, repetition_penalty=1.1, seed=3),
)
CHAIN, TREE = (3, 1, 4), (5, 4, 8)
CONCURRENCY = 8


@cache
def prompts() -> list[list[int]]:
    """Return prompts of 14 to 131 tokens, rendered by the model's chat template."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    chats = (f"<|bos|><|user|>{message}<|end|><|assistant|>" for message in held_out_prompts(8, seed=3))
    return [tokenizer.encode(chat, add_special_tokens=False).ids for chat in chats]


def answers(
    shape: tuple[int, int, int] | None,
    ranks: int = 1,
    page_size: int = 16,
    model: Path = MODEL,
    draft: str = "",
    method: Method = "mtp",
    **settings: Any,
) -> list[Request]:
    """Return greedy and sampled answers to every prompt; ranks compare tokens in every step. settings: the draft's."""
    speculative = None if shape is None else SpeculativeConfig(draft, method, *shape, adaptive=False, **settings)
    worker = WorkerConfig(
        ModelSource(str(model), dtype="float32", device="cpu"),
        CacheConfig(page_size, num_pages=8192 // page_size),
        SchedulerConfig(max_running=CONCURRENCY, max_step_tokens=256),
        tensor_parallel=ranks,
        measure_costs=False,
        debug=True,
    )
    sampling = [
        setting
        for i in range(len(prompts()))
        for setting in (SamplingParams(16 + i, 0.0, stop_token_ids=(EOS,)), SAMPLED[i % len(SAMPLED)])
    ]
    with local_engine(EngineSpec(worker, speculative)) as engine:
        return engine.generate([prompt for prompt in prompts() for _ in range(2)], sampling, CONCURRENCY)


def accepted_tokens(requests: list[Request]) -> float:
    """Tokens a round of the greedy answers."""
    accepted, rounds = 0, 0
    for request in requests[::2]:
        accepted += sum(k * count for k, count in enumerate(request.acceptance_histogram))
        rounds += sum(request.acceptance_histogram)
    return 1 + accepted / rounds


@cache
def plain(model: Path) -> list[list[int]]:
    return [request.output for request in answers(None, model=model)]


@pytest.mark.parametrize(
    "model,shape,ranks,page_size,rows,least",
    [
        pytest.param(MODEL, CHAIN, 1, 16, 0, 2.2, id="chain", marks=pytest.mark.slow),
        pytest.param(MODEL, TREE, 1, 1, 0, 2.5, id="tree, pages of 1"),
        pytest.param(MODEL, CHAIN, 2, 1, 0, 2.2, id="chain, 2 ranks, pages of 1", marks=pytest.mark.slow),
        pytest.param(MODEL, TREE, 2, 16, 0, 2.5, id="tree, 2 ranks", marks=pytest.mark.slow),
        pytest.param(HYBRID, CHAIN, 1, 16, 0, 2.4, id="hybrid, chain", marks=pytest.mark.slow),
        pytest.param(HYBRID, TREE, 1, 1, 128, 2.6, id="hybrid, tree, pages of 1, trimmed", marks=pytest.mark.slow),
        pytest.param(HYBRID, CHAIN, 2, 1, 0, 2.4, id="hybrid, chain, 2 ranks, pages of 1", marks=pytest.mark.slow),
        pytest.param(HYBRID, TREE, 2, 16, 0, 2.7, id="hybrid, tree, 2 ranks", marks=pytest.mark.slow),
    ],
)
def test_its_module_changes_no_token(
    model: Path, shape: tuple[int, int, int], ranks: int, page_size: int, rows: int, least: float
) -> None:
    """Greedy and drawn. In float32 on one machine: passes of different widths differ by about 1e-5 in a logit, and two
    best tokens or experts that close occur about once in 10^5 tokens; the run is deterministic, so it fails always or
    never on a machine. rows: of a trimmed vocabulary head."""
    requests = answers(shape, ranks, page_size, model, draft_vocab_size=rows)
    assert [request.output for request in requests] == plain(model)
    assert accepted_tokens(requests) > least


@pytest.mark.slow
@pytest.mark.parametrize(
    "method,shape,ranks",
    [
        pytest.param("dspark", (8, 4, 16), 1, id="DSpark, tree"),
        pytest.param("dflash2", (7, 1, 8), 1, id="DFlash2, chain"),
        pytest.param("dflash2", (7, 4, 16), 2, id="DFlash2, tree, 2 ranks"),
    ],
)
def test_block_heads_of_a_hybrid_change_no_token(method: Method, shape: tuple[int, int, int], ranks: int) -> None:
    requests = answers(shape, ranks, model=HYBRID, draft=str(HYBRID / method), method=method)
    assert [request.output for request in requests] == plain(HYBRID)
    assert accepted_tokens(requests) > 3.0


def run_keys(engine: LocalEngine) -> list[GraphKey]:
    """Collect the keys of the graphs that the engine runs from now on."""
    keys: list[GraphKey] = []
    strategy = engine.executor._strategy  # type: ignore[attr-defined]
    of_key = strategy._graph_for

    def noted(key: GraphKey) -> CapturedStep | None:
        found: CapturedStep | None = of_key(key)
        if found is not None and key in strategy.captured:
            keys.append(key)
        return found

    strategy._graph_for = noted
    return keys


@pytest.mark.gpu
def test_a_graph_expands_prompts_that_begin() -> None:
    """Prompts of 900 tokens together, in a captured step and eagerly: the same sums but for the sizes that products are
    padded to, so that answers part at near ties only."""
    texts = [[token for prompt in prompts()[i : i + 4] for token in prompt] for i in range(4)]
    found, keys = [], list[GraphKey]()
    for graphs in (True, False):
        worker = WorkerConfig(
            ModelSource(str(MODEL), dtype="bfloat16", device="cuda"),
            CacheConfig(16, num_pages=512, prefix_cache=False),
            SchedulerConfig(max_running=4, max_step_tokens=2048),
            cuda_graphs=graphs,
            measure_costs=False,
        )
        with local_engine(EngineSpec(worker, SpeculativeConfig("", "mtp", *CHAIN, adaptive=False))) as engine:
            keys = run_keys(engine) if graphs else keys
            found.append([request.output for request in engine.generate(texts, SamplingParams(8, 0.0), 4)])
    assert any(key.seen > 0 for key in keys)
    assert sum(a == b for a, b in zip(*found, strict=True)) >= 3
