"""KV in FP8 on a small trained model, the embedded pair: needles in a text, the loss at its longest context, and
acceptance, beside those with 16 bits.

The model was trained on texts of a few hundred tokens. It finds a number again over up to about a hundred tokens and,
at its longest context of 2,048, in neither dtype: there the loss is compared, and `test_fp8_needles` has a model that
finds needles."""

import random
from dataclasses import replace

import pytest

from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.scheduling.plan import SamplingParams
from tests.speculative.requests.test_prompt_logprobs import TOP, collect, requests_of
from tests.speculative.test_losslessness import acceptance_length
from tests.support.embedded import CHAIN, embedded_spec, eos_token_ids
from tests.support.prompts import held_out_prompts, tokenized

NUM_NEEDLES = 24


def spec(dtype: str, speculative: SpeculativeConfig | None = None) -> EngineSpec:
    plain = embedded_spec(speculative, debug=False)
    return replace(plain, worker=replace(plain.worker, cache=replace(plain.worker.cache, dtype=dtype)))


def content(text: str) -> list[int]:
    """Its tokens, without those of the chat template."""
    return tokenized([text])[0][2:-2]


def needles(between: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts and, for each, the two digits that should follow. A prompt says how many apples somebody has, goes
    on with `between` tokens of other text, and then begins the answer."""
    filler = [token for message in tokenized(held_out_prompts(40, seed=9)) for token in message[2:-2]]
    rng, prompts, answers = random.Random(1), [], []
    for i in range(NUM_NEEDLES):
        name, number = rng.choice(("Ines", "Tomas", "Wanjiru", "Kofi")), rng.randint(11, 99)
        first = tokenized([f"{name} has {number} apples. "])[0][:-2]
        asked = tokenized([f"How many apples does {name} have?"])[0][2:]
        prompts.append(first + filler[i * 13 : i * 13 + between] + asked + content(f"{name} has "))
        answers.append(content(str(number)))
    return prompts, answers


@pytest.mark.slow  # a trained model finds its needles in `test_fp8_needles`
@pytest.mark.parametrize("between,least", [(70, 0.3), (0, 0.7)])
def test_needles_are_found_as_often(between: int, least: float) -> None:
    prompts, answers = needles(between)
    found = {}
    for dtype in ("model", "fp8_e4m3"):
        with local_engine(spec(dtype)) as engine:
            requests = engine.generate(prompts, SamplingParams(2, 0.0), 8)
        found[dtype] = sum(r.output == answer for r, answer in zip(requests, answers, strict=True))
    assert found["model"] >= least * NUM_NEEDLES
    assert found["fp8_e4m3"] >= found["model"] - 1


@pytest.mark.slow
def test_the_loss_at_the_longest_context_stays() -> None:
    filler = [token for message in tokenized(held_out_prompts(120, seed=5)) for token in message]
    prompts = [filler[i * 900 : i * 900 + 2040] for i in range(3)]
    loss = {}
    for dtype in ("model", "fp8_e4m3"):
        with local_engine(spec(dtype)) as engine:
            rows = collect(engine, requests_of(prompts, SamplingParams(1, 0.0, prompt_logprobs=TOP)), 3)
        late = [-row[0] for of_prompt in rows.values() for position, row in of_prompt.items() if position > 1000]
        loss[dtype] = sum(late) / len(late)
    print(f"nats per token after 1,000 tokens: {loss}")
    assert abs(loss["fp8_e4m3"] - loss["model"]) < 0.02


@pytest.mark.slow
def test_acceptance_stays() -> None:
    prompts = tokenized(held_out_prompts(32))
    sampling = SamplingParams(48, 0.0, stop_token_ids=eos_token_ids())
    lengths = {}
    for dtype in ("model", "fp8_e4m3"):
        with local_engine(spec(dtype, CHAIN)) as engine:
            lengths[dtype] = acceptance_length(engine.generate(prompts, sampling, 16))
    print(f"acceptance length: {lengths}")
    assert lengths["fp8_e4m3"] > 0.96 * lengths["model"]
