"""`aerie.LLM` with a published GGUF file: forms of answers, Unicode, several turns."""

import asyncio
import json

import pytest
import torch

from aerie.deploy.offline.async_llm import AsyncLLM
from aerie.deploy.offline.sampling_params import SamplingParams
from tests.support.targets.published import published_file

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "people": {"type": "integer", "maximum": 99}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
EMOJI = "🕰️👩\u200d👧 ¿é? 日本"


async def answers() -> tuple[str, list[str], str]:
    options = {"tensor_parallel_size": 1, "max_model_len": 512, "max_num_seqs": 3}
    async with AsyncLLM(str(published_file()), draft="suffix", **options) as llm:
        forced = SamplingParams(max_tokens=40, temperature=0.0, structured_outputs={"json": SCHEMA})
        copied = SamplingParams(max_tokens=40, temperature=0.0, structured_outputs={"choice": [EMOJI]})

        async def text(question: str, params: SamplingParams) -> list[str]:
            turns = [{"role": "user", "content": question}]
            return [out.outputs[0].text async for out in llm.chat(turns, params, question)]

        form, texts, plain = await asyncio.gather(
            text("Name a city and how many people live in it, as JSON.", forced),
            text("Which signs?", copied),
            text("What is the capital of France?", SamplingParams(max_tokens=12, temperature=0.0)),
        )
        return form[-1], texts, plain[-1]


@pytest.mark.slow  # forms, streams and turns: tests of the embedded model; tokens: `test_published_gguf`
def test_forms_and_unicode_are_whole_on_a_published_model() -> None:
    torch.set_num_threads(1)
    form, texts, plain = asyncio.run(answers())
    found = json.loads(form)
    assert found.keys() == {"city", "people"} and found["people"] <= 99
    assert texts[-1] == EMOJI and all("\ufffd" not in text for text in texts)
    assert plain == "The capital of France is Paris."
