"""Between text and tokens over HTTP: what is tokenized is what a request of the same messages would be."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from aerie.cluster.http.text.chat_template import ChatTemplate
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from tests.support.edge_client import CHAT, MODEL, in_process
from tests.support.fake_engine import EOS, FakeEngine, says, small_tokenizer

WITH_TOOLS = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools><tool_call>{% endif %}{% for m in messages %}{{ m.role }}:"
    "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
USER = {"role": "user", "content": f"hello {EOS}"}
ANSWER = {"role": "assistant", "content": "it is"}


@pytest.mark.parametrize(
    ("tokenize", "chat"),
    [
        ({"messages": [USER]}, {}),
        ({"messages": [USER], "tools": [TOOL]}, {}),
        ({"messages": [USER], "tools": [TOOL], "tool_choice": "none"}, {}),
        (
            {"messages": [USER, ANSWER], "continue_final_message": True, "add_generation_prompt": False},
            {},
        ),
        ({"messages": [USER, ANSWER], "continue_final_message": True}, {}),
        ({"messages": [USER], "add_generation_prompt": False, "return_token_strs": True}, {"return_token_strs": None}),
    ],
)
async def test_a_chat_is_tokenized_as_it_would_be_asked(tokenize: dict[str, Any], chat: dict[str, Any]) -> None:
    engine = FakeEngine(says("x"))
    tokenizer = ChatTokenizer(small_tokenizer(), ChatTemplate(WITH_TOOLS, {}), (1,))
    asked = {name: value for name, value in (tokenize | chat).items() if value is not None}
    async with in_process(engine, tokenizer, output_parser="hermes") as client:
        found = (await client.post("/tokenize", json={"model": MODEL, **tokenize})).json()
        assert (await client.post(CHAT, json={"model": MODEL, **asked})).status_code == 200
    assert found["tokens"] == engine.calls[0].prompt and found["count"] == len(found["tokens"])
    if tokenize.get("return_token_strs"):
        assert found["token_strs"] == [small_tokenizer().id_to_token(token) for token in found["tokens"]]


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_special_tokens_are_left_out_of_texts_on_request(prefix: str) -> None:
    async with in_process(FakeEngine(says("x"))) as client:
        tokens = (await client.post(f"{prefix}/tokenize", json={"prompt": f"hello{EOS}"})).json()["tokens"]
        for skips, text in ((None, f"hello{EOS}"), (False, f"hello{EOS}"), (True, "hello")):
            body = {"tokens": tokens, "skip_special_tokens": skips}
            found = (await client.post(f"{prefix}/detokenize", json=body)).json()
            assert found == {"prompt": text} | ({} if skips is None else {"text": text})


async def test_far_more_tokens_than_the_models_length_are_refused() -> None:
    async with in_process(FakeEngine(says("x")), max_model_len=8) as client:
        replies = [await client.post("/detokenize", json={"tokens": [66] * num}) for num in (16, 17)]
    assert [reply.status_code for reply in replies] == [200, 400]
    assert replies[1].json()["error"]["code"] == "context_length_exceeded"


async def test_what_cannot_be_continued_is_refused() -> None:
    body = {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True}
    async with in_process(FakeEngine(says("x"))) as client:
        error = (await client.post("/tokenize", json=body)).json()["error"]
    assert error["param"] == "continue_final_message"


@pytest.mark.parametrize("name", ["TokenizersBackend", None])
async def test_tokenizer_info_names_the_class_of_the_models_folder(tmp_path: Path, name: str | None) -> None:
    if name is None:
        tokenizer = ChatTokenizer(small_tokenizer(), None, (1,))
    else:
        PreTrainedTokenizerFast(tokenizer_object=small_tokenizer()).save_pretrained(tmp_path)
        tokenizer = ChatTokenizer.from_folder(tmp_path)
    async with in_process(FakeEngine(says("x")), tokenizer) as client:
        assert (await client.get("/tokenizer_info")).json()["tokenizer_class"] == name
