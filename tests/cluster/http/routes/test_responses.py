"""/v1/responses: whole and streamed, with calls and reasoning, and turns that follow stored ones."""

import json
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.cluster.http.parsers.test_tools import tool_tokenizer
from tests.support.edge_client import MODEL, served
from tests.support.edge_client import in_process as any_length
from tests.support.fake_engine import FakeEngine, refuses, says, small_tokenizer

RESPONSES = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
ASK: dict[str, Any] = {"model": MODEL, "input": "hi"}
THINKS = {"chat_template_kwargs": {"enable_thinking": True}}
CALL = '<tool_call>{"name": "weather", "arguments": {"place": "Bern"}}</tool_call>'
ANSWER = says("so", " be", " it</think>", "I look. ", CALL[:30], CALL[30:])


def in_process(engine: FakeEngine, **config: Any) -> httpx.AsyncClient:
    return any_length(engine, tool_tokenizer(), max_model_len=4096, **config)


def _prompt(engine: FakeEngine, index: int = -1) -> str:
    return small_tokenizer().decode(engine.calls[index].prompt)


def _events(text: str) -> list[dict[str, Any]]:
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, payload = block.split("\n")
        events.append(json.loads(payload.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def test_a_whole_response_has_reasoning_text_and_calls() -> None:
    async with in_process(FakeEngine(ANSWER)) as client:
        reply = await client.post(RESPONSES, json=ASK | THINKS | {"tools": [WEATHER], "instructions": "be brief"})
    document = reply.json()
    assert reply.status_code == 200, reply.text
    reasoning, message, call = document["output"]
    assert (document["object"], document["status"], document["instructions"]) == ("response", "completed", "be brief")
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "so be it"}]
    assert message["content"] == [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "weather", '{"place": "Bern"}')
    usage = document["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == len(small_tokenizer().encode("so be it").ids)
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


async def test_events_make_the_response_that_ends_them() -> None:
    async with in_process(FakeEngine(ANSWER)) as client:
        reply = await client.post(RESPONSES, json=ASK | THINKS | {"tools": [WEATHER], "stream": True})
    events = _events(reply.text)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["id"] for item in added] == [item["id"] for item in done]
    assert added[1]["content"] == [] and added[2]["arguments"] == ""


async def test_openais_client_streams_parses_and_goes_on() -> None:
    class Answer(BaseModel):
        a: int

    script = says("hmm</think>", '{"a"', ": 1}")
    engine = FakeEngine(script)
    async with (
        served(engine, tool_tokenizer(), max_model_len=4096) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        async with client.responses.stream(model=MODEL, input="hi", extra_body=THINKS) as stream:
            types = [event.type async for event in stream]
            final = await stream.get_final_response()
        parsed = await client.responses.parse(model=MODEL, input="hi", text_format=Answer, extra_body=THINKS)
        assert await client.responses.retrieve(final.id)
        await client.responses.delete(final.id)
        with pytest.raises(openai.NotFoundError, match="Response with id .* not found"):
            await client.responses.retrieve(final.id)
    assert types[0] == "response.created" and types[-1] == "response.completed"
    assert final.output_text == '{"a": 1}' and parsed.output_parsed == Answer(a=1)
    grammar = engine.calls[-1].sampling.grammar
    assert grammar is not None and grammar.kind == "structural_tag", "thinking goes before the form"


async def test_turns_follow_the_stored_one() -> None:
    engine = FakeEngine(says("one"))
    async with in_process(engine) as client:
        first = (await client.post(RESPONSES, json=ASK | {"instructions": "be brief"})).json()
        follow = ASK | {"input": "and?", "previous_response_id": first["id"]}
        second = (await client.post(RESPONSES, json=follow)).json()
        await client.post(RESPONSES, json=ASK | {"input": "so?", "previous_response_id": second["id"], "store": False})
        unknown = await client.post(RESPONSES, json=ASK | {"previous_response_id": "resp_0"})
    assert _prompt(engine, 0) == "system: be brief\nuser: hi\nassistant:"
    assert _prompt(engine, 1) == "user: hi\nassistant: one\nuser: and?\nassistant:", "instructions are not kept"
    assert _prompt(engine, 2).endswith("assistant: one\nuser: so?\nassistant:")
    error = unknown.json()["error"]
    assert (unknown.status_code, error["code"]) == (404, "previous_response_not_found")


async def test_what_is_stored_is_bounded() -> None:
    async with in_process(FakeEngine(says("one")), max_stored_responses=2) as client:
        ids = [(await client.post(RESPONSES, json=ASK)).json()["id"] for _ in range(3)]
        found = [(await client.get(f"{RESPONSES}/{each}")).status_code for each in ids]
        not_kept = (await client.post(RESPONSES, json=ASK | {"store": False})).json()
        assert (await client.get(f"{RESPONSES}/{not_kept['id']}")).status_code == 404
    assert found == [404, 200, 200] and not_kept["store"] is False
    async with in_process(FakeEngine(says("one")), max_stored_bytes=100) as client:
        large = (await client.post(RESPONSES, json=ASK)).json()["id"]
        assert (await client.get(f"{RESPONSES}/{large}")).status_code == 404
    async with in_process(FakeEngine(says("one")), max_stored_responses=0) as client:
        assert (await client.post(RESPONSES, json=ASK)).json()["store"] is False
        assert (await client.post(RESPONSES, json=ASK | {"store": True})).json()["error"]["param"] == "store"


async def test_items_of_every_form_are_messages() -> None:
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "rain?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"place": "Bern"}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "dry"},
    ]
    engine = FakeEngine(says("x"))
    async with in_process(engine) as client:
        reply = await client.post(RESPONSES, json=ASK | {"input": items})
    assert reply.status_code == 200, reply.text
    assert _prompt(engine) == (
        'system: d\nuser: rain?\nassistant: I look.[weather {"place": "Bern"}][weather {}]\ntool: dry\nassistant:'
    )


async def test_cut_short_is_incomplete_and_failures_are_events() -> None:
    async with in_process(FakeEngine(says("one", finish="length"))) as client:
        whole = (await client.post(RESPONSES, json=ASK | {"max_output_tokens": 3})).json()
    assert whole["status"] == "incomplete" and whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["output"][0]["status"] == "incomplete"
    async with in_process(FakeEngine(says("one", "two", finish="error", error="boom"))) as client:
        events = _events((await client.post(RESPONSES, json=ASK | {"stream": True})).text)
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2]["code"] == "engine_error" and events[-1]["response"]["status"] == "failed"
    async with in_process(FakeEngine(refuses("queue_full"))) as client:
        assert (await client.post(RESPONSES, json=ASK | {"stream": True})).status_code == 429


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input",
        ),
        ({"input": [{"role": "<|no|>", "content": "x"}]}, "input[0].role"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"background": True}, "background"),
        ({"truncation": "all"}, "truncation"),
        ({"conversation": "c"}, "conversation"),
        ({"max_output_tokens": 5000}, "input"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ],
)
async def test_bad_input_is_400_with_the_parameter(extra: dict[str, Any], param: str) -> None:
    async with in_process(FakeEngine(says("x"))) as client:
        reply = await client.post(RESPONSES, json=ASK | extra)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


async def test_sampling_parameters_of_chats_reach_the_engine() -> None:
    given = {
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"3": -100},
        "stop_token_ids": [9],
        "ignore_eos": True,
        "min_tokens": 2,
        "stop": ["ld"],
        "include_stop_str_in_output": True,
    }
    engine = FakeEngine(says("hello", " world"))
    async with in_process(engine) as client:
        reply = await client.post(RESPONSES, json=ASK | given)
        shaped = await client.post(RESPONSES, json=ASK | {"structured_outputs": {"choice": ["a", "b"]}})
    assert reply.status_code == shaped.status_code == 200, reply.text
    sampling, grammar = engine.calls[0].sampling, engine.calls[1].sampling.grammar
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.5)
    assert (sampling.logit_bias, sampling.stop_token_ids, sampling.min_tokens) == ({3: -100.0}, (9,), 2)
    assert grammar is not None and "const_string" in grammar.text


async def test_a_stored_response_comes_as_events_too() -> None:
    async with in_process(FakeEngine(ANSWER)) as client:
        stream = await client.post(RESPONSES, json=ASK | THINKS | {"tools": [WEATHER], "stream": True})
        sent = _events(stream.text)
        place = f"{RESPONSES}/{sent[-1]['response']['id']}"
        replay = await client.get(place, params={"stream": "true"})
        rest = await client.get(place, params={"stream": "true", "starting_after": "3"})
        wrong = await client.get(place, params={"stream": "true", "starting_after": "x"})
        whole = (await client.get(place)).json()
    assert replay.headers["content-type"].startswith("text/event-stream")
    replayed = _events(replay.text)
    assert replayed[-1] == {"type": "response.completed", "sequence_number": len(replayed) - 1, "response": whole}

    def gist(events: list[dict[str, Any]]) -> Any:
        """Items and texts, however they were cut."""
        done = [(event["type"], event.get("item"), event.get("text")) for event in events if "done" in event["type"]]
        deltas = [event["delta"] for event in events if "delta" in event["type"]]
        return done, "".join(deltas)

    assert gist(replayed) == gist(sent)
    kinds = [[event["type"] for event in events if "delta" not in event["type"]] for events in (replayed, sent)]
    assert kinds[0] == kinds[1]
    assert rest.text == "".join(f"{block}\n\n" for block in replay.text.split("\n\n")[4:-1])
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "starting_after"


@pytest.mark.parametrize("stream", [False, True])
async def test_functions_of_a_namespace_are_called_and_come_back_by_their_own_name(stream: bool) -> None:
    call = CALL.replace("weather", "mcp__sky__weather")
    search = {"type": "web_search"}
    tools = [{"type": "namespace", "name": "mcp__sky__", "tools": [WEATHER, search]}, WEATHER]
    engine = FakeEngine(says(call))
    async with in_process(engine, output_parser="hermes") as client:
        reply = await client.post(RESPONSES, json=ASK | {"tools": tools, "stream": stream})
        assert reply.headers["x-aerie-ignored"] == "tools[0].tools[1].type=web_search"
        document = _events(reply.text)[-1]["response"] if stream else reply.json()
        (item,) = document["output"]
        assert (item["namespace"], item["name"], item["arguments"]) == ("mcp__sky__", "weather", '{"place": "Bern"}')
        shown = json.loads(_prompt(engine).partition("TOOLS ")[2].partition(" <tool_call>")[0])
        assert [tool["function"]["name"] for tool in shown] == ["mcp__sky__weather", "weather"]
        kept = await client.get(f"{RESPONSES}/{document['id']}", params={"stream": "true"})
        assert _events(kept.text)[-1]["response"]["output"] == [item]
        result = {"type": "function_call_output", "call_id": item["call_id"], "output": "rain"}
        for more in ({"input": [item, result]}, {"input": [result], "previous_response_id": document["id"]}):
            reply = await client.post(RESPONSES, json=ASK | {"tools": tools} | more)
            assert reply.status_code == 200, reply.text
            assert "[mcp__sky__weather " in _prompt(engine)
        same = [tools[0], tools[0]]
        reply = await client.post(RESPONSES, json=ASK | {"tools": same})
        assert reply.status_code == 400 and "two functions have the same name" in reply.json()["error"]["message"]


async def test_compaction_is_not_found() -> None:
    async with in_process(FakeEngine(says("x"))) as client:
        reply = await client.post(f"{RESPONSES}/compact", json=ASK)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")


async def test_allowed_tools_are_shown_and_the_choice_comes_back() -> None:
    inside = {"type": "function", "name": "weather", "namespace": "sky"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [inside, {"type": "web_search"}]}
    tools = [WEATHER | {"name": "sea"}, {"type": "namespace", "name": "sky", "tools": [WEATHER]}]
    engine = FakeEngine(says(CALL.replace("weather", "sky__weather")))
    async with in_process(engine) as client:
        reply = (await client.post(RESPONSES, json=ASK | {"tools": tools, "tool_choice": choice})).json()
    assert reply["tool_choice"] == choice and (reply["output"][0]["namespace"], reply["output"][0]["name"]) == (
        "sky",
        "weather",
    )
    assert '"sky__weather"' in _prompt(engine) and '"sea"' not in _prompt(engine)


async def test_reasoning_without_text_is_no_turn() -> None:
    engine = FakeEngine(says("x"))
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "abc"}
    items = [{"role": "user", "content": "rain?"}, thought, thought, {"role": "user", "content": "wind?"}]
    async with in_process(engine) as client:
        reply = await client.post(RESPONSES, json=ASK | {"input": items})
    assert reply.status_code == 200, reply.text
    assert _prompt(engine).endswith("user: rain?\nuser: wind?\nassistant:")


@pytest.mark.parametrize("texts", [("<to", "ol ", "is", " it"), ("<think>so", "</think>", "it ", "is"), ("it", "")])
async def test_streams_lose_no_log_probability_of_text_that_was_held(texts: tuple[str, ...]) -> None:
    body = ASK | {"tools": [WEATHER], "top_logprobs": 1}
    async with in_process(FakeEngine(says(*texts))) as client:
        (whole,) = [each for each in (await client.post(RESPONSES, json=body)).json()["output"] if "role" in each]
        events = _events((await client.post(RESPONSES, json=body | {"stream": True})).text)
    (streamed,) = [each for each in events[-1]["response"]["output"] if "role" in each]
    assert streamed["content"] == whole["content"]
    sent = [token for event in events if event["type"].endswith("text.delta") for token in event.get("logprobs") or ()]
    logprobs = whole["content"][0]["logprobs"]
    assert sent == (logprobs[:-1] if texts[-1] == "" else logprobs)  # no text is left for the end of the sequence


async def test_a_document_has_its_items_in_the_order_of_the_stream() -> None:
    """The answer was cut off in the text after a call: the text is incomplete, the call before it is not."""
    body = ASK | {"tools": [WEATHER]}
    async with in_process(FakeEngine(says(CALL[:20], CALL[20:], " and", " then", finish="length"))) as client:
        whole = (await client.post(RESPONSES, json=body)).json()["output"]
        events = _events((await client.post(RESPONSES, json=body | {"stream": True})).text)
    for output in (whole, events[-1]["response"]["output"]):
        assert [(item["type"], item["status"]) for item in output] == [
            ("function_call", "completed"),
            ("message", "incomplete"),
        ]
        assert output[0]["arguments"] == '{"place": "Bern"}'
