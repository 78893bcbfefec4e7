"""Compatibility with vLLM and SGLang: null keys, names of parameters, routes."""

from typing import Any

import openai
import pytest

from tests.cluster.http.parsers.test_tools import tool_tokenizer
from tests.support.edge_client import CHAT, HELLO, MODEL, PROMPT, TEXT, events, in_process, served
from tests.support.fake_engine import EOS, FakeEngine, says, small_tokenizer

EOS_ID = small_tokenizer().token_to_id(EOS)
THINKS = HELLO | {"chat_template_kwargs": {"enable_thinking": True}}
THOUGHT = says("so", " be", " it</think>", "yes")
OPENED = says("<thi", "nk>\nso b", "e it\n</thi", "nk>\n\nyes")
USER = {"role": "user", "content": "hi"}


async def post(engine: FakeEngine, route: str, body: dict[str, Any], **headers: str) -> Any:
    async with in_process(engine, tool_tokenizer(), max_model_len=4096) as client:
        reply = await client.post(route, json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return events(reply.text) if body.get("stream") else reply.json()


async def refusal(route: str, body: dict[str, Any]) -> Any:
    engine = FakeEngine(says("x"))
    async with in_process(engine, tool_tokenizer(), max_model_len=4096) as client:
        reply = await client.post(route, json=body)
    assert reply.status_code == 400 and not engine.calls, reply.text
    return reply.json()["error"]["param"]


async def test_openais_client_finds_the_keys_that_vllm_has() -> None:
    async with (
        served(FakeEngine(says("hello")), tool_tokenizer(), max_model_len=4096) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        chat: Any = await client.chat.completions.create(**HELLO)  # type: ignore[call-overload]
        text: Any = await client.completions.create(**PROMPT)  # type: ignore[call-overload]
    message = chat.choices[0].message
    assert (message.reasoning, message.reasoning_content) == (None, None)
    assert (chat.prompt_logprobs, chat.prompt_token_ids, chat.choices[0].token_ids) == (None, None, None)
    assert chat.usage.completion_tokens_details.reasoning_tokens == 0
    choice = text.choices[0]
    assert (choice.prompt_logprobs, choice.prompt_token_ids, choice.token_ids) == (None, None, None)


@pytest.mark.parametrize(("route", "body"), [(CHAT, HELLO), (TEXT, PROMPT)])
async def test_every_event_of_a_stream_has_token_ids_where_they_are_asked_for(route: str, body: dict[str, Any]) -> None:
    chunks = await post(FakeEngine(says("hello", " you")), route, body | {"return_token_ids": True, "stream": True})
    tokens = sum((chunk["choices"][0]["token_ids"] for chunk in chunks), [])
    assert tokens == [*small_tokenizer().encode("hello").ids, *small_tokenizer().encode(" you").ids, EOS_ID]
    assert chunks[0]["choices"][0]["prompt_token_ids"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize(("script", "asked"), [(THOUGHT, THINKS), (OPENED, HELLO)])
async def test_reasoning_tokens_are_counted_shown_or_not(stream: bool, shown: bool, script: Any, asked: Any) -> None:
    body = asked | {"stream": stream, "include_reasoning": shown}
    if stream:
        body |= {"stream_options": {"include_usage": True}}
    reply = await post(FakeEngine(script), CHAT, body)
    usage = (reply[-1] if stream else reply)["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(small_tokenizer().encode("so be it").ids)


@pytest.mark.parametrize(
    ("script", "stop", "expected"),
    [
        (says("hello"), {}, (None, EOS_ID)),
        (says("hello"), {"stop": ["lo"]}, ("lo", "lo")),
        (says("hello", finish="length"), {}, (None, None)),
        (says("hello"), {"stop_token_ids": [EOS_ID], "ignore_eos": True}, (EOS_ID, EOS_ID)),
    ],
)
async def test_matched_stop_names_the_end_of_sequence_too(script: Any, stop: Any, expected: Any) -> None:
    for route, body in ((CHAT, HELLO), (TEXT, PROMPT)):
        whole = (await post(FakeEngine(script), route, body | stop))["choices"][0]
        last = (await post(FakeEngine(script), route, body | stop | {"stream": True}))[-1]["choices"][0]
        assert (whole["stop_reason"], whole["matched_stop"]) == expected
        assert (last["stop_reason"], last["matched_stop"]) == expected


@pytest.mark.parametrize(("route", "body", "prefix"), [(CHAT, HELLO, "chatcmpl-"), (TEXT, PROMPT, "cmpl-")])
async def test_the_clients_id_names_the_reply_and_may_come_twice(route: str, body: dict[str, Any], prefix: str) -> None:
    engine = FakeEngine(says("x"))  # fails where two generations have one name
    async with in_process(engine) as client:
        for extra, headers in (({"request_id": "mine"}, {}), ({"rid": "mine"}, {}), ({}, {"X-Request-Id": "mine"})):
            reply = await client.post(route, json=body | extra, headers=headers)
            assert reply.json()["id"] == f"{prefix}mine" and reply.headers["x-request-id"] == "mine"
        unnamed = [(await client.post(route, json=body)).json()["id"] for _ in range(2)]
    assert len(set(unnamed)) == 2


@pytest.mark.parametrize(("side", "kept"), [(None, "world"), ("left", "world"), ("right", "hello")])
async def test_truncation_keeps_the_side_that_is_wanted(side: str | None, kept: str) -> None:
    engine = FakeEngine(says("x"))
    body = PROMPT | {"prompt": "hello world", "truncate_prompt_tokens": 1, "truncation_side": side}
    await post(engine, TEXT, body)
    assert small_tokenizer().decode(engine.calls[0].prompt).strip() == kept


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
async def test_echo_puts_the_assistants_last_message_before_the_answer(stream: bool, echo: bool) -> None:
    messages = [USER, {"role": "assistant", "content": "An apple a day"}]
    body = HELLO | {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    reply = await post(FakeEngine(says(" keeps", " on")), CHAT, body | {"echo": echo, "stream": stream})
    parts = [chunk["choices"][0]["delta"].get("content", "") for chunk in reply] if stream else []
    text = "".join(parts) if stream else reply["choices"][0]["message"]["content"]
    assert text == ("An apple a day keeps on" if echo else " keeps on")
    reply = await post(FakeEngine(says("so")), CHAT, HELLO | {"echo": True, "logprobs": True})
    assert reply["choices"][0]["message"]["content"] == "so", "the last message is the user's"


async def test_no_stop_trim_shows_the_stop_string() -> None:
    reply = await post(FakeEngine(says("hello world")), CHAT, HELLO | {"stop": ["wor"], "no_stop_trim": True})
    assert reply["choices"][0]["message"]["content"] == "hello wor"


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_may_stay_in_the_content(stream: bool) -> None:
    reply = await post(FakeEngine(THOUGHT), CHAT, THINKS | {"separate_reasoning": False, "stream": stream})
    deltas = [chunk["choices"][0]["delta"] for chunk in reply] if stream else [reply["choices"][0]["message"]]
    assert "".join(delta.get("content", "") for delta in deltas) == "so be it</think>yes"
    assert not any(delta.get("reasoning") for delta in deltas)


async def test_reasoning_may_come_whole() -> None:
    chunks = await post(FakeEngine(THOUGHT), CHAT, THINKS | {"stream_reasoning": False, "stream": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta["reasoning"] for delta in deltas if "reasoning" in delta] == ["so be it"]
    assert "".join(delta.get("content", "") for delta in deltas) == "yes"


async def test_input_ids_are_the_prompt() -> None:
    engine = FakeEngine(says("x"))
    await post(engine, CHAT, HELLO | {"input_ids": [5, 6, 7]})
    assert engine.calls[0].prompt == [5, 6, 7]


async def test_a_batch_has_a_choice_for_each_conversation() -> None:
    def script(prompt: list[int], sampling: Any) -> Any:
        return says("one</think>uno" if "one" in small_tokenizer().decode(prompt) else "two</think>duo")(
            prompt, sampling
        )

    engine = FakeEngine(script)
    conversations = [[{"role": "user", "content": "one"}], [USER, {"role": "assistant", "content": "so"}, USER]]
    body = THINKS | {"messages": conversations, "seed": 5, "logprobs": True, "return_token_ids": True}
    reply = await post(engine, f"{CHAT}/batch", body)
    messages = [choice["message"] for choice in reply["choices"]]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert [(m["content"], m["reasoning"]) for m in messages] == [("uno", "one"), ("duo", "two")]
    assert reply["usage"]["prompt_tokens"] == sum(len(call.prompt) for call in engine.calls)
    assert {call.sampling.seed for call in engine.calls} == {5}
    assert all(choice["token_ids"] for choice in reply["choices"]) and reply["prompt_token_ids"] is None


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"tools": [{}]}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": [USER]}, "messages[0]"),
        ({"messages": [[USER], []]}, "messages[1]"),
        ({"messages": [[USER], [{"role": "user"}]]}, "messages[1][0].content"),
        ({"messages": [[USER]] * 200}, "messages"),
        ({"messages": [[USER] * 100] * 100}, "messages"),
    ],
)
async def test_what_a_batch_cannot_have_is_named(change: dict[str, Any], param: str) -> None:
    assert await refusal(f"{CHAT}/batch", HELLO | {"messages": [[USER]]} | change) == param


async def test_invocations_are_chats_or_completions_by_their_body() -> None:
    chat = await post(FakeEngine(says("hello")), "/invocations", HELLO)
    text = await post(FakeEngine(says("hello")), "/invocations", PROMPT)
    assert (chat["object"], text["object"]) == ("chat.completion", "text_completion")
    stream = await post(FakeEngine(says("hello")), "/invocations", HELLO | {"stream": True})
    assert stream[0]["object"] == "chat.completion.chunk"
    assert await refusal("/invocations", {"model": MODEL}) == "prompt"
    assert await refusal("/invocations", HELLO | {"temperature": 9}) == "temperature"


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("stop", [None, "ld"])
async def test_every_event_of_a_completion_has_its_tokens_logprobs_the_last_too(
    echo: bool, finish: str, stop: str | None
) -> None:
    """As with vLLM and SGLang, whose own tests look at the first entry of every event."""
    script = says("hello", " wor", "ld", finish=finish)
    body = PROMPT | {"logprobs": 2, "echo": echo, "stop": stop}
    chunks = await post(FakeEngine(script), TEXT, body | {"stream": True})
    choices = [chunk["choices"][0] for chunk in chunks]
    assert all(choice["logprobs"]["tokens"] for choice in choices)
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop" if stop else finish]
    (whole,) = (await post(FakeEngine(script), TEXT, body))["choices"]
    assert "".join(choice["text"] for choice in choices) == whole["text"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("skip", "shown"), [(None, ""), (True, ""), (False, "<|im_start|>")])
async def test_echo_of_token_ids_shows_special_tokens_if_the_answer_does(
    stream: bool, skip: bool | None, shown: str
) -> None:
    """The default is the tokenized text, as with SGLang, without the beginning-of-sequence token."""
    prompt = [small_tokenizer().token_to_id("<|im_start|>"), *small_tokenizer().encode("hello world").ids]
    body = PROMPT | {"prompt": prompt, "echo": True, "logprobs": 1, "skip_special_tokens": skip, "stream": stream}
    reply = await post(FakeEngine(says("x", finish="length")), TEXT, body)
    choices = [chunk["choices"][0] for chunk in reply] if stream else reply["choices"]
    assert "".join(choice["text"] for choice in choices) == f"{shown}hello worldx"
    logprobs = choices[0]["logprobs"]
    assert logprobs["tokens"][:3] == ["<|im_start|>", "hello", " world"], "each has its log-probability"
    assert logprobs["text_offset"][:3] == [0, len(shown), len(shown) + len("hello")]
