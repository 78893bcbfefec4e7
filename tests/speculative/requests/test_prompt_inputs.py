"""Prompts with inputs besides their token ids, and layers that know their rows' requests: docs/add-an-input.md."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from aerie.attention.config import CacheConfig
from aerie.speculative.build import EngineSpec, local_engine
from aerie.workers.config import GraphCapture, ModelSource, SchedulerConfig, WorkerConfig
from aerie.workers.distributed.tp_group import SOLO
from aerie.workers.layers.forward_context import RowIndex
from aerie.workers.prompt_inputs import Embeddings, PromptInputs
from aerie.workers.runner.graphs.cuda_graph import GraphedDecoding
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.runner.worker import Worker
from aerie.workers.scheduling.plan import SamplingParams, pack_i32
from aerie.workers.scheduling.request import Request
from tests.speculative.conftest import EOS, Pair
from tests.speculative.test_graphs_while_serving import TOKENS
from tests.support.kernels.eager_graphs import LazyRecorder
from tests.support.tiny_models import VOCAB, make_target

GREEDY = SamplingParams(12, 0.0, stop_token_ids=(EOS,))
PLACEHOLDER = 5
SLOW = pytest.mark.slow


def speculation(pair: Pair, shape: str) -> Any:
    return {"plain": None, "chain": pair.chain(), "tree": pair.tree()}[shape]


def embeddings_of(pair: Pair, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    weight = load_file(pair.target / "model.safetensors")["model.embed_tokens.weight"]
    rows: npt.NDArray[np.float32] = weight[list(tokens)].float().numpy()
    return rows


def embedded(pair: Pair, name: str, prompt: list[int], *spans: tuple[int, int]) -> Request:
    """A request for `prompt`, whose tokens in spans are given as embeddings, under the id of a placeholder."""
    ids, parts = list(prompt), []
    for start, end in spans:
        parts.append(Embeddings.of(start, embeddings_of(pair, prompt[start:end])))
        ids[start:end] = [PLACEHOLDER] * (end - start)
    return Request(name, ids, GREEDY, inputs=PromptInputs(tuple(parts)))


def texts(engine: LocalEngine, prompts: Sequence[list[int]]) -> list[list[int]]:
    return [request.output for request in engine.generate(prompts, GREEDY, 1)]


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [
        ("chain", 1),
        ("tree", 2),
        *(pytest.param(*kind, marks=SLOW) for kind in (("plain", 1), ("tree", 1), ("plain", 2), ("chain", 2))),
    ],
)
def test_embeddings_of_the_tokens_give_the_tokens_answers(pair: Pair, shape: str, ranks: int) -> None:
    """Steps of 24 prompt tokens, so that chunks end within spans; pages for two requests, so that others are
    preempted and computed again."""
    spec = pair.spec(
        speculation(pair, shape),
        CacheConfig(page_size=4, num_pages=30),
        SchedulerConfig(max_running=6, max_step_tokens=24),
        tensor_parallel=ranks,
    )
    prompts = [prompt for prompt in pair.prompts if len(prompt) > 8]
    with local_engine(spec) as engine:
        expected = texts(engine, prompts)
        requests = []
        for i, prompt in enumerate(prompts):
            length = len(prompt)
            spans = ((0, length),) if i % 3 == 0 else ((1, length // 2), (length // 2 + 2, length - 1))
            requests.append(embedded(pair, f"{i}", prompt, *spans))
        engine.run(requests, 6)
        assert [request.output for request in requests] == expected
        assert sum(request.num_preemptions for request in requests) > 0
        wrong = Request("ids", requests[0].prompt, GREEDY)
        engine.run([wrong], 1)
        assert wrong.output != expected[0], "the placeholders alone mean something else"


@pytest.mark.parametrize("shape", [pytest.param("plain", marks=SLOW), "tree"])
def test_pages_are_shared_by_equal_embeddings_only(pair: Pair, shape: str) -> None:
    first, second = max(pair.prompts, key=len), list(reversed(max(pair.prompts, key=len)))
    start, end = 6, len(first) - 3
    second = first[:start] + second[start:end] + first[end:]
    with local_engine(pair.spec(speculation(pair, shape))) as engine:
        expected = texts(engine, [first, second])
    with local_engine(pair.spec(speculation(pair, shape))) as engine:
        requests = [
            embedded(pair, f"{i}", prompt, (start, end)) for i, prompt in enumerate((first, second, first, second))
        ]
        assert requests[0].prompt == requests[1].prompt, "placeholders do not distinguish them"
        for request in requests:
            engine.run([request], 1)
        assert [request.output for request in requests] == expected * 2
        full = (len(first) - 1) // 4 * 4
        assert [request.cached_tokens for request in requests] == [0, 4, full, full]
        plain = Request("ids", requests[0].prompt, GREEDY)
        engine.run([plain], 1)
        assert plain.cached_tokens == 4


def positions_with_gap(length: int) -> list[int]:
    """As of a text with an image of six tokens on two rows: they have three positions, and the text goes on after."""
    image = [4, 5, 6, 4, 5, 6]
    return [0, 1, 2, 3, *image, *range(11, 11 + length - 10)]


def reference(pair: Pair, prompt: list[int], positions: list[int]) -> list[int]:
    """Greedy tokens of transformers at these rotary positions."""
    model = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32, attn_implementation="eager")
    ids, places = list(prompt), list(positions)
    with torch.inference_mode():
        while len(ids) < len(prompt) + GREEDY.max_tokens and (len(ids) == len(prompt) or ids[-1] != EOS):
            tensors = (
                torch.tensor([ids]),
                torch.ones(1, len(ids)),
                torch.tensor([places]),
            )  # without a mask: packed texts
            logits = model(*tensors, use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
            places.append(places[-1] + 1)
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    ("shape", "ranks"), [("plain", 1), pytest.param("tree", 2, marks=SLOW), pytest.param("chain", 1, marks=SLOW)]
)
def test_positions_are_those_of_the_rotation_only(pair: Pair, shape: str, ranks: int) -> None:
    prompts = sorted(pair.prompts, key=len)[-4:]
    given = [positions_with_gap(len(prompt)) for prompt in prompts]
    expected = [reference(pair, prompt, places) for prompt, places in zip(prompts, given, strict=True)]
    spec = pair.spec(
        speculation(pair, shape), CacheConfig(page_size=4, num_pages=58), SchedulerConfig(6, 24), tensor_parallel=ranks
    )
    with local_engine(spec) as engine:
        before = texts(engine, prompts)
        assert before != expected, "these positions change answers"
        for turn in range(2):
            requests = [
                Request(f"{turn}-{i}", prompt, GREEDY, inputs=PromptInputs(positions=pack_i32(places)))
                for i, (prompt, places) in enumerate(zip(prompts, given, strict=True))
            ]
            engine.run(requests, 6)
            assert [request.output for request in requests] == expected
        assert texts(engine, prompts) == before, "texts do not use their pages"


def test_inputs_that_do_not_fit_are_refused(pair: Pair) -> None:
    prompt, rows = list(range(2, 12)), embeddings_of(pair, range(4))
    narrow, short = Embeddings.of(0, rows[:, 1:]), replace(Embeddings.of(0, rows), digest=b"short")
    cases = {
        "10 tokens": PromptInputs((Embeddings.of(7, rows),)),
        "without overlap": PromptInputs((Embeddings.of(2, rows), Embeddings.of(4, rows))),
        "hidden_size=64 have 1024": PromptInputs((narrow,)),
        "at least 16 bytes": PromptInputs((short,)),
        "one for each of the 10 tokens": PromptInputs(positions=pack_i32(range(9))),
        "from -1 to 8": PromptInputs(positions=pack_i32(range(-1, 9))),
        "must be the largest": PromptInputs(positions=pack_i32([*range(9), 3])),
    }
    with local_engine(pair.spec(None)) as engine:
        for text, inputs in cases.items():
            with pytest.raises(ValueError, match=text):
                engine.scheduler.submit(Request(text, prompt, GREEDY, inputs=inputs))
        assert engine.scheduler.num_waiting == 0


def test_halves_are_read_as_they_were_written() -> None:
    rows = torch.tensor([[1.5, -2.25, 3e-3, 65000.0]])
    for dtype in (torch.bfloat16, torch.float16):
        data = rows.to(dtype).view(torch.uint8).numpy().tobytes()
        name: Any = str(dtype).removeprefix("torch.")
        found = Embeddings(0, 1, data, bytes(32), name).rows()
        assert found.dtype == np.float32 and torch.equal(torch.from_numpy(found.copy()), rows.to(dtype).float())


def with_adapters(engine: LocalEngine, always: int | None = None) -> RowIndex:
    """Give each row of two layers the vector that its request's seed names, one of three; always: to every row."""
    worker = engine.executor
    assert isinstance(worker, Worker)
    target, index = worker._strategy._target, RowIndex()  # type: ignore[attr-defined]
    object.__setattr__(target, "row_index", index)
    seeds = worker._slots.values["seed"]
    for layer, name in ((0, "self_attn.o_proj"), (-1, "mlp.down_proj")):  # all rows; those that attend in the last
        method = target.model.layers[layer].get_submodule(name).method
        vectors = torch.randn(3, method.shape.out_features, generator=torch.Generator().manual_seed(layer + 7)) * 0.2

        def multiply(
            x: Tensor, bias: Any, out: Any = None, inner: Any = method.multiply, vectors: Tensor = vectors
        ) -> Tensor:
            slots = index.of(x.shape[0])
            assert slots.dtype == torch.int32 and slots.shape == x.shape[:1]
            choice = seeds[slots.long()].clamp(0, 2) if always is None else torch.full_like(slots, always).long()
            y: Tensor = inner(x, bias, out)
            return y.add_(vectors[choice])

        method.multiply = multiply
        method.multiply_apart = lambda x: None
    return index


@pytest.mark.parametrize("shape", [pytest.param("plain", marks=SLOW), pytest.param("chain", marks=SLOW), "tree"])
def test_layers_know_their_rows_requests(pair: Pair, shape: str) -> None:
    """With three "adapters" in one batch, eagerly and in recorded steps, each request gets the answer of an engine that
    has its adapter alone."""
    prompts, seeds = pair.prompts[:6], [0, 1, 2, 2, 1, 0]
    spec = pair.spec(speculation(pair, shape))
    expected: dict[int, list[int]] = {}
    for adapter in range(3):
        with local_engine(spec) as engine:
            with_adapters(engine, always=adapter)
            mine = [i for i, seed in enumerate(seeds) if seed == adapter]
            expected |= dict(zip(mine, texts(engine, [prompts[i] for i in mine]), strict=True))
    with local_engine(spec) as engine:
        without = dict(enumerate(texts(engine, prompts)))
    assert without != expected
    with local_engine(spec) as engine:
        with_adapters(engine)
        worker, recorder = engine.executor, LazyRecorder()
        assert isinstance(worker, Worker)
        sampling = [replace(GREEDY, seed=seed, cache_salt=bytes([seed])) for seed in seeds]
        assert dict(enumerate(r.output for r in engine.generate(prompts, sampling))) == expected
        graphs = GraphedDecoding(
            worker._strategy, worker._slots, (1, 2, 4, 6), 256, recorder, TOKENS, has_row_index=True
        )
        with torch.inference_mode():
            graphs.capture(GraphCapture(limit_s=1e9), SOLO)
        worker._strategy = graphs
        engine.scheduler.flush_prefix_cache()
        assert dict(enumerate(r.output for r in engine.generate(prompts, sampling))) == expected
        assert recorder.num_replays > 0


def test_a_pass_without_such_layers_computes_no_row_index(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    with local_engine(pair.spec(pair.tree())) as engine:
        worker = engine.executor
        assert isinstance(worker, Worker)
        model = worker._strategy._target.model  # type: ignore[attr-defined]
        forward = model.forward

        def noted(ids: Tensor, context: Any) -> Any:
            seen.append(context)
            return forward(ids, context)

        monkeypatch.setattr(model, "forward", noted)
        engine.generate(pair.prompts[:3], GREEDY)
    assert seen and not any("row_slots" in vars(context) for context in seen)


@pytest.mark.parametrize(
    ("architecture", "implementation"),
    [
        ("Qwen3_5", "auto"),
        pytest.param("Gemma3", "auto", marks=SLOW),
        pytest.param("Gemma", "transformers", marks=SLOW),
    ],
)
def test_recurrent_windowed_and_adapted_models_take_embeddings(
    tmp_path: Path, architecture: str, implementation: Any
) -> None:
    """A second run finds as much of the first one as texts do."""
    target = make_target(tmp_path, architecture=architecture)
    spec = EngineSpec(
        WorkerConfig(
            ModelSource(path=str(target), device="cpu", implementation=implementation),
            CacheConfig(page_size=4, num_pages=120, state_snapshots=16),
            SchedulerConfig(max_running=4, max_step_tokens=24),
            measure_costs=False,
            debug=True,
        ),
        None,
    )
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (37, 22)]
    with local_engine(spec) as engine:
        expected = texts(engine, prompts)
        model = engine.executor._strategy._target.model  # type: ignore[attr-defined]
        scale = vars(model).get("embedding_scale") or 1.0
        for turn in range(2):
            requests = []
            for i, prompt in enumerate(prompts):
                with torch.inference_mode():
                    rows = (model.embed_tokens(torch.tensor(prompt[3:-2])) * scale).numpy()
                ids = [*prompt[:3], *[PLACEHOLDER] * len(rows), *prompt[-2:]]
                requests.append(Request(f"{turn}-{i}", ids, GREEDY, inputs=PromptInputs((Embeddings.of(3, rows),))))
            engine.run(requests, 4)
            assert [request.output for request in requests] == expected
        again = engine.generate(prompts, GREEDY, 1)
        assert [each.cached_tokens for each in requests] == [each.cached_tokens for each in again]
