"""FP8 KV at long context: a small trained model finds needles as often as over KV in 16 bits, with drafts and without.

Passes read what the cache stores: rows of prompts and of verified drafts are rounded to FP8 before attention. The model
(`tests.support.targets.needles`) was trained without FP8, on texts of up to 2,048 tokens. Keys and values with a
mantissa of one bit, for e4m3's three, would lose it a third of the answers; with two bits it loses none."""

from dataclasses import dataclass

import pytest
import torch

from aerie.attention.config import CacheConfig
from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import ModelSource, SchedulerConfig, WorkerConfig
from aerie.workers.scheduling.plan import SamplingParams
from tests.support import ROOT
from tests.support.slow import slow
from tests.support.targets.needles import ANSWER, NEEDLES, texts

MODEL = ROOT / "tests" / "models" / "retrieval_tiny"
TEXTS = 2  # of 12 needles


@dataclass(frozen=True)
class Found:
    """outputs: of each question. right: answers of which all tokens are right. accepted: drafted tokens."""

    outputs: list[list[int]]
    right: int
    accepted: int


def found(length: int, dtype: str, speculative: SpeculativeConfig | None = None) -> Found:
    """Ask for every needle of some texts of `length` tokens. dtype: of the KV cache; the model's is bfloat16."""
    tokens, keys, values = texts(TEXTS, length, NEEDLES, torch.Generator().manual_seed(length))
    prompts = [[*tokens[i].tolist(), key] for i in range(TEXTS) for key in keys[i].tolist()]
    cache = CacheConfig(16, num_pages=TEXTS * length // 16 + 200, dtype=dtype)
    model = ModelSource(str(MODEL), device="cpu", dtype="bfloat16")
    worker = WorkerConfig(model, cache, SchedulerConfig(4, 512), measure_costs=False)
    with local_engine(EngineSpec(worker, speculative)) as engine:
        requests = engine.generate(prompts, SamplingParams(ANSWER, 0.0), 4)
    outputs = [request.output for request in requests]
    right = sum(output == answer for output, answer in zip(outputs, values.flatten(0, 1).tolist(), strict=True))
    accepted = sum(count * rounds for each in requests for count, rounds in enumerate(each.acceptance_histogram))
    return Found(outputs, right, accepted)


@pytest.mark.parametrize("length", [1024, *slow(2048, 4096)])
def test_needles_are_found_as_often(length: int) -> None:
    in_16_bits, in_8_bits = found(length, "model"), found(length, "fp8_e4m3")
    print(f"{length} tokens, right of {TEXTS * NEEDLES}: {in_16_bits.right} in bfloat16, {in_8_bits.right} in FP8")
    assert in_16_bits.right > 0.9 * TEXTS * NEEDLES
    assert in_8_bits.right >= in_16_bits.right - 2


@pytest.mark.slow  # drafts over pages of FP8: `test_fp8_kv`
@pytest.mark.parametrize("length", [1024, 4096])
def test_drafts_change_no_answer(length: int) -> None:
    """Drafts are copied from the text, where the answer is: most are right."""
    copied = SpeculativeConfig(method="suffix", num_steps=ANSWER - 1, num_draft_tokens=ANSWER)
    plain, drafted = found(length, "fp8_e4m3"), found(length, "fp8_e4m3", copied)
    assert drafted.outputs == plain.outputs
    assert drafted.accepted > 0.5 * TEXTS * NEEDLES
