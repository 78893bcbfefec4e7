"""Log-probabilities of prompts on a GPU: those of transformers, beside captured rounds. Prints what they cost."""

import time

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from aerie.speculative.build import local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.runner.worker import Worker
from aerie.workers.scheduling.plan import SamplingParams, StepPlan
from aerie.workers.scheduling.request import Request
from tests.speculative.gpu.test_gpu import on_gpu
from tests.speculative.gpu.test_gpu_sampling import graphs
from tests.speculative.requests.test_prompt_logprobs import collect, requests_of
from tests.support import MODELS
from tests.support.embedded import CHAIN, TREE
from tests.support.kernels.gpu_waits import refuse_gpu_waits
from tests.support.prompts import held_out_prompts, tokenized

pytestmark = pytest.mark.gpu

ASKING = SamplingParams(24, 0.0, prompt_logprobs=3)


@pytest.mark.parametrize("speculative", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_prompt_logprobs_beside_captured_rounds(
    speculative: SpeculativeConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second request asks; no step waits for the GPU before its result is read, and nothing is captured anew."""
    prompts = tokenized(held_out_prompts(26))
    model = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32).eval()
    submit = Worker.submit

    def without_waits(self: Worker, plan: StepPlan) -> None:
        with refuse_gpu_waits():
            submit(self, plan)

    with local_engine(on_gpu(speculative, dtype="float32")) as engine:
        alone = engine.generate(prompts, SamplingParams(24, 0.0))
        at_start = graphs(engine).captured
        monkeypatch.setattr(Worker, "submit", without_waits)
        requests = requests_of(prompts, ASKING)
        for request in requests[1::2]:
            request.sampling = SamplingParams(24, 0.0)
        found = collect(engine, requests, 13)
        assert graphs(engine).captured == at_start
    same = sum(a.output == b.output for a, b in zip(requests, alone, strict=True))
    assert same >= len(prompts) - 1, "a tie in 10^4 tokens, where chunks are cut otherwise"
    for i, prompt in enumerate(prompts):
        rows = found[f"r{i}"]
        assert sorted(rows) == (list(range(1, len(prompt))) if i % 2 == 0 else [])
        if not rows:
            continue
        with torch.inference_mode():
            expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0], -1)
        for position, (logprob, rank, ids, top) in rows.items():
            row = expected[position - 1]
            # float32 products of a GPU and a CPU, in other orders
            assert logprob == pytest.approx(float(row[prompt[position]]), abs=2e-3)
            assert top == pytest.approx(row.topk(3).values.tolist(), abs=2e-3)
            assert row[ids].tolist() == pytest.approx(top, abs=2e-3)
            assert abs(rank - 1 - int((row > row[prompt[position]]).sum())) <= 1


def test_what_they_cost() -> None:
    """Prompts of 1,500 tokens, with and without; prints milliseconds a prompt."""
    generator = np.random.default_rng(0)
    prompts = [generator.integers(5, 1000, 1500).tolist() for _ in range(16)]
    with local_engine(on_gpu(CHAIN)) as engine:
        for k in (-1, 0, 5, 20):
            for timed in (False, True):
                requests = [
                    Request(f"{k}-{timed}-{i}", p, SamplingParams(1, prompt_logprobs=k)) for i, p in enumerate(prompts)
                ]
                engine.scheduler.flush_prefix_cache()
                begin = time.perf_counter()
                engine.run(requests, 4)
                spent_ms = (time.perf_counter() - begin) / len(prompts) * 1e3
            print(f"prompt_logprobs={k}: {spent_ms:.2f} ms a prompt of 1500")
