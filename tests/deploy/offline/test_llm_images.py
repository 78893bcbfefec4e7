"""`LLM.chat` with pictures."""

import base64
from pathlib import Path

import pytest

from aerie.deploy.offline.llm import LLM
from aerie.deploy.offline.sampling_params import SamplingParams
from tests.support.targets.image_models import (
    END_TOKEN,
    START_TOKEN,
    ImagePrompts,
    add_tokenizer,
    file_of,
    make_image_model,
    picture,
)


def test_a_chat_with_a_picture_is_answered_as_by_transformers(tmp_path: Path) -> None:
    model, image = make_image_model(tmp_path, "qwen2_5_vl"), picture(1, 40, 40)
    add_tokenizer(tmp_path)
    url = "data:image/png;base64," + base64.b64encode(file_of(image)).decode()
    part = {"type": "image_url", "image_url": {"url": url}}
    chat = [{"role": "user", "content": [part, {"type": "text", "text": "what is it?"}]}]
    of, sampling = ImagePrompts(tmp_path), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with LLM(str(tmp_path), enforce_eager=True) as llm:
        (answer,) = llm.chat(chat, sampling)
        ids = list(answer.prompt_token_ids or ())
        start, end = ids.index(START_TOKEN), ids.index(END_TOKEN) + 1
        assert list(answer.outputs[0].token_ids) == of.by_transformers(model, [*ids[:start], image, *ids[end:]], 8)
        broken = [{"role": "user", "content": [part | {"image_url": {"url": "data:image/png;base64,aGVsbG8="}}]}]
        with pytest.raises(ValueError, match="the image cannot be used: it is not a PNG"):
            llm.chat(broken, sampling)
