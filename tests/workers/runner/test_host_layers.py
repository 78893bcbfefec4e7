"""An engine on a CPU whose layers are single C++ kernels answers as one whose operations are called one by one, and a
request's answer and log-probabilities do not depend on the requests beside it: both bit for bit."""

import pytest
import torch

from aerie.kernels.capability import Capability
from aerie.kernels.cpp_library import compiles
from aerie.kernels.gemm import choice
from aerie.workers.layers.decoder_layer import DecoderLayer
from aerie.workers.models.loading import read_target_config
from aerie.workers.runner.layout import plan_engine
from aerie.workers.runner.local_engine import local_engine
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request, RequestOutput
from tests.support.embedded import embedded_spec
from tests.support.prompts import held_out_prompts, tokenized

pytestmark = pytest.mark.skipif(not compiles(Capability.of(torch.device("cpu"))), reason="no C++ compiler")

Answer = tuple[list[int], list[object]]


def _answers(concurrency: int, fused: list[bool]) -> list[Answer]:
    worker = embedded_spec(None).worker
    prompts = [prompt[:40] for prompt in tokenized(held_out_prompts(5))]
    found: dict[str, Answer] = {}

    def listen(output: RequestOutput) -> None:
        tokens, logprobs = found.setdefault(output.request.request_id, ([], []))
        tokens += output.tokens
        logprobs += output.logprobs

    original = DecoderLayer._on_host

    def counted(self: DecoderLayer, *arguments: object) -> torch.Tensor | None:
        out = original(self, *arguments)  # type: ignore[arg-type]
        fused.append(out is not None)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "_MIN_PACKED_WEIGHTS", 0)
        patch.setattr(DecoderLayer, "_on_host", counted)
        with local_engine(worker, plan_engine(worker, read_target_config(worker.model, 1))) as engine:
            sampling = SamplingParams(12, 0.0, logprobs=2)
            requests = [Request(f"{i}", prompt, sampling) for i, prompt in enumerate(prompts)]
            engine.run(requests, concurrency, listen)
    return [found[f"{i}"] for i in range(len(prompts))]


def test_layers_as_one_kernel_and_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    fused: list[bool] = []
    alone = _answers(1, fused)
    assert any(fused)
    together = _answers(5, fused)
    assert together == alone
    monkeypatch.setattr(DecoderLayer, "host_weights", None)
    apart: list[bool] = []
    assert _answers(1, apart) == alone
    assert not any(apart)
