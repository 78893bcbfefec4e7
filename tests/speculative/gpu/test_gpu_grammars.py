"""Grammars on a GPU, where steps are graphs that are cut in two: answers are valid, equal with and without speculation,
and the cut graphs ran."""

import dataclasses

import pytest

from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.runner.graphs.cuda_graph import GraphedDecoding
from aerie.workers.runner.worker import Worker
from tests.speculative.requests.test_grammars import MAX_TOKENS, SCHEMAS, SHAPES, requests
from tests.support.embedded import embedded_spec
from tests.support.structured_output.sampled import assert_follows


def on_gpu(speculative: SpeculativeConfig | None) -> EngineSpec:
    """The embedded pair; deterministic, so that batches and shapes change no token."""
    spec = embedded_spec(speculative)
    model = dataclasses.replace(spec.worker.model, device="cuda")
    return dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, model=model, deterministic=True))


@pytest.mark.gpu
def test_cut_graphs_give_valid_and_equal_answers() -> None:
    outputs: dict[str, list[list[int]]] = {}
    for name, speculative in SHAPES.items():
        asked = requests(SCHEMAS, 7)
        with local_engine(on_gpu(speculative)) as engine:
            worker = engine.executor
            assert isinstance(worker, Worker) and isinstance(worker._strategy, GraphedDecoding)
            cut = [captured for key, captured in worker._strategy._captured.items() if key.needs.masked]
            replays = 0

            def counted(begin):  # type: ignore[no-untyped-def]
                def run() -> None:
                    nonlocal replays
                    replays += 1
                    begin()

                return run

            for captured in cut:
                captured.begin = counted(captured.begin)
            engine.run(asked, 6)
        outputs[name] = [request.output for request in asked]
        whole = [
            assert_follows(schema, tokens, MAX_TOKENS)
            for i, (schema, tokens) in enumerate(zip(SCHEMAS, outputs[name], strict=True))
            if i % 7
        ]
        assert sum(whole) > 3 and replays > 10
    assert outputs["chain"] == outputs["plain"] and outputs["tree"] == outputs["plain"]
