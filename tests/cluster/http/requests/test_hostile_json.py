"""JSON that UTF-8 cannot express, or nested without end: in bodies, in texts within them, in what models write."""

import contextlib
import json
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from aerie.cluster.http.schema.body import MAX_CONTAINERS
from aerie.cluster.http.text.json_text import MAX_NESTING, nesting, parsed, parsed_repaired, repaired
from tests.cluster.http.parsers.test_parsers import FORMS
from tests.cluster.http.parsers.test_tools import WEATHER, tool_tokenizer
from tests.support.edge_client import CHAT, HELLO, MODEL, PROMPT, RESPONSES, TEXT, in_process
from tests.support.fake_engine import FakeEngine, says, small_tokenizer

MESSAGES = "/v1/messages"
HALF = r'{"place": "Bern \ud83d", "\udc00": "\ud83d\ude00 \\ud83d"}'
WHOLE = {"place": "Bern \ufffd", "\ufffd": "\U0001f600 \\ud83d"}
DEEP = '{"a":' * 900 + "1" + "}" * 900


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def chat_after(arguments: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    turns = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "rain"}]
    return {"model": MODEL, "messages": [*HELLO["messages"], *turns]}


def response_after(arguments: str) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": arguments}
    return {"model": MODEL, "input": [call, {"type": "function_call_output", "call_id": "c", "output": "rain"}]}


@pytest.mark.parametrize(("route", "after"), [(CHAT, chat_after), (RESPONSES, response_after)])
async def test_a_conversation_goes_on_after_half_an_emoji_in_a_calls_arguments(route: str, after: Any) -> None:
    engine = FakeEngine(says("x"))
    async with in_process(engine, tool_tokenizer(), max_model_len=4096) as client:
        reply = await client.post(route, json=after(HALF))
        assert reply.status_code == 200, reply.text
        reply = await client.post(route, json=after('{"a": "two\nlines"}'))
        assert reply.status_code == 200, reply.text
        reply = await client.post(route, json=after(DEEP))
        assert reply.status_code == 200 and "arguments" in reply.headers["x-aerie-ignored"]
    assert "[weather {}]" in small_tokenizer().decode(engine.calls[2].prompt)  # too deep for a template
    prompt = small_tokenizer().decode(engine.calls[0].prompt)
    assert json.loads(prompt.partition("[weather ")[2].partition("]")[0]) == WHOLE


HALF_SCHEMAS = [r'{"enum": ["\ud800"]}', r'{"type": "object", "properties": {"\udfff": {}}}', r'{"\ud800": 1}']
BAD_SCHEMAS = [*HALF_SCHEMAS, '{"const": NaN}', '{"minimum": 1e999}', '{"maximum": -Infinity}', DEEP, "[" * 10**5]


@pytest.mark.parametrize("schema", BAD_SCHEMAS, ids=range(len(BAD_SCHEMAS)))
async def test_a_schema_in_a_text_is_read_as_strictly_as_a_body(schema: str) -> None:
    asks = [
        (TEXT, PROMPT | {"json_schema": schema}, "json_schema"),
        (CHAT, HELLO | {"guided_json": schema}, "guided_json"),
        (CHAT, HELLO | {"structured_outputs": {"json": schema}}, "structured_outputs.json"),
        (TEXT, PROMPT | {"structured_outputs": {"structural_tag": schema}}, "structured_outputs.structural_tag"),
        ("/generate", {"text": "x", "sampling_params": {"json_schema": schema}}, "sampling_params.json_schema"),
    ]
    async with in_process(FakeEngine(says("x"))) as client:
        for route, body, param in asks:
            reply = await client.post(route, json=body)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
            assert "is not JSON: " in reply.text


@pytest.mark.parametrize(
    "extra",
    [
        {"regex": r"(\ud83d\ude00)+"},
        {"structured_outputs": {"regex": r"[\uDFFF]"}},
        {"structured_outputs": {"structural_tag": {"format": {"type": "regex", "pattern": r"\ud83d"}}}},
    ],
)
async def test_half_a_character_in_a_regular_expression_is_refused(extra: dict[str, Any]) -> None:
    """The compiler would make bytes of it that are no UTF-8."""
    async with in_process(FakeEngine(says("x"))) as client:
        reply = await client.post(TEXT, json=PROMPT | extra)
    assert reply.status_code == 400 and "is half of a character" in reply.text


async def test_a_byte_order_mark_is_no_fault() -> None:
    raw = json.dumps(HELLO).encode()
    async with in_process(FakeEngine(says("x"))) as client:
        for encoded, status in ((b"\xef\xbb\xbf" + raw, 200), (raw.decode().encode("utf-16"), 400)):
            reply = await client.post(CHAT, content=encoded, headers={"content-type": "application/json"})
            assert reply.status_code == status, reply.text


def _bodies(value: Any) -> list[tuple[str, dict[str, Any]]]:
    """Requests with `value` in every object whose fields are free."""
    message = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": value}]}
    schema = {"type": "object", "properties": {"a": value}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    named = {"type": "function", "name": "f", "parameters": schema}
    ask = {"model": MODEL, "input": "hi"}
    forms: list[dict[str, Any]] = [{"const": value}, {"enum": [value]}, {"default": value}, schema]
    chats = [
        {"tools": [tool]},
        {"metadata": value},
        {"unknown": value},
        {"chat_template_kwargs": {"a": value}},
        *({"structured_outputs": {"json": form}} for form in forms),
        {"structured_outputs": {"structural_tag": {"format": value}}},
    ]
    return [
        *((CHAT, HELLO | extra) for extra in chats),
        *((RESPONSES, ask | extra) for extra in ({"tools": [named]}, {"metadata": value}, {"text": {"format": value}})),
        (MESSAGES, message | {"tools": [{"name": "f", "input_schema": schema}]}),
        (MESSAGES, message | {"messages": [*message["messages"], used]}),
        (MESSAGES, message | {"chat_template_kwargs": {"a": value}}),
        (f"{MESSAGES}/count_tokens", message | {"tools": [{"name": "f", "input_schema": schema}]}),
        ("/generate", {"text": "x", "sampling_params": {"json_schema": {"const": value}, "structural_tag": value}}),
        ("/tokenize", {"messages": HELLO["messages"], "tools": [tool]}),
    ]


@pytest.mark.parametrize("depth", [190, 260, 900])
async def test_no_depth_of_nesting_is_a_fault_of_the_server(depth: int) -> None:
    async with in_process(FakeEngine(says("x")), tool_tokenizer(), max_model_len=40_000) as client:
        for route, body in _bodies(nested(depth)):
            reply = await client.post(route, json=body)
            assert reply.status_code in (200, 400), (route, [*body], reply.text)
            assert depth < MAX_NESTING or "nested more than" in reply.text


ANSWERS = [(name, answer.replace('"x"', r'"\ud83d"').replace("[1", r'["\udc00"')) for name, answer, *_ in FORMS]
ANSWERS += [
    ("pythonic", r"[weather(place='\ud83d')]"),
    ("gemma4", "<|tool_call>call:weather{a:NaN,b:1e999,c:[-Infinity]}<tool_call|>"),
    ("hermes", r'<tool_call>{"name": "\ud83d", "arguments": {}}</tool_call>'),
    ("hermes", f'<tool_call>{{"name": "weather", "arguments": {DEEP}}}</tool_call>'),
]


@pytest.mark.parametrize(("parser", "answer"), ANSWERS, ids=[f"{i}-{name}" for i, (name, _) in enumerate(ANSWERS)])
async def test_what_a_model_writes_is_always_a_reply(parser: str, answer: str) -> None:
    tool = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}  # type: ignore[index]
    asks = [
        (CHAT, HELLO | {"tools": [WEATHER]}),
        (RESPONSES, {"model": MODEL, "input": "hi", "tools": [{"type": "function", **WEATHER["function"]}]}),  # type: ignore[dict-item]
        (MESSAGES, HELLO | {"max_tokens": 4000, "tools": [tool]}),
    ]
    for stream in (False, True):
        engine = FakeEngine(says(answer))
        async with in_process(engine, tool_tokenizer(), max_model_len=8192, output_parser=parser) as client:
            for route, body in asks:
                reply = await client.post(route, json=body | {"stream": stream})
                assert reply.status_code == 200 and '"error":{' not in reply.text, (route, reply.text[:300])
                if not stream and route == CHAT:
                    for call in reply.json()["choices"][0]["message"]["tool_calls"] or ():
                        json.loads(call["function"]["arguments"], parse_constant=pytest.fail)


_STRINGS = st.text(st.characters(exclude_categories=()), max_size=8)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _STRINGS,
    lambda part: st.lists(part, max_size=3) | st.dictionaries(_STRINGS, part, max_size=3),
    max_leaves=8,
)


@hypothesis.given(_VALUES, st.booleans())
@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
def test_json_of_all_code_points(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    if not ascii_only:
        hypothesis.assume(text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text))
    found = parsed_repaired(text)
    json.dumps(found, ensure_ascii=False).encode()
    assert repaired(repaired(text)) == repaired(text)
    if repaired(text) == text:
        assert parsed(text) == found == json.loads(text)
    else:
        with pytest.raises(ValueError, match="surrogate"):
            parsed(text)


_texts = st.text(st.sampled_from('[]{}"\\:,é\ud83d\n'), max_size=5)
_values = st.recursive(
    _texts | st.integers(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_texts, inner, max_size=4),
    max_leaves=30,
)


def _counted(value: Any) -> tuple[int, int]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    inner = [_counted(part) for part in parts]
    own = isinstance(value, dict | list)
    return own + sum(num for num, _ in inner), own + max((depth for _, depth in inner), default=0)


@hypothesis.given(_values, st.booleans())
def test_lists_and_objects_of_a_document_are_counted(value: Any, ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert nesting(raw) == _counted(value)


async def test_what_would_hold_up_other_requests_for_seconds_is_refused_before_the_work() -> None:
    """Millions of lists took 3 to 9 s of the event loop, of which decoding was a third."""
    many: list[tuple[str, dict[str, Any]]] = [
        (CHAT, HELLO | {"x": [[]] * MAX_CONTAINERS}),
        ("/generate", {"text": "x", "sampling_params": {"logit_bias": {str(i): 1 for i in range(1025)}}}),
        ("/generate", {"text": ["x"], "sampling_params": [{"logit_bias": {str(i): 1 for i in range(1025)}}]}),
    ]
    async with in_process(FakeEngine(says("x"))) as client:
        for route, body in many:
            reply = await client.post(route, json=body)
            assert reply.status_code == 400 and "are allowed" in reply.text, reply.text
        text = HELLO | {"messages": [{"role": "user", "content": "hi"}], "user": '[{"' * MAX_CONTAINERS}
        assert (await client.post(CHAT, json=text)).status_code == 200


@pytest.mark.parametrize("depth", [0, 1, MAX_NESTING - 2, MAX_NESTING - 1, MAX_NESTING, 500])
async def test_the_depth_of_a_body_and_of_a_text_within_it_have_one_limit(depth: int) -> None:
    """Values that a duplicate of their key replaces count for both."""
    deep = json.dumps(nested(depth))
    documents = [f'{{"x": {deep}}}', f'{{"x": {deep}, "x": 1}}', f'{{"x": [], "x": {deep}, "y": ["{"[" * 300}"]}}']
    async with in_process(FakeEngine(says("x"))) as client:
        for document in documents:
            body = json.dumps(HELLO)[:-1] + ", " + document[1:]
            reply = await client.post(CHAT, content=body.encode(), headers={"content-type": "application/json"})
            assert reply.status_code == (400 if depth + 1 > MAX_NESTING else 200), reply.text
            for read in (parsed, parsed_repaired):
                with pytest.raises(ValueError, match="deep") if depth + 1 > MAX_NESTING else contextlib.nullcontext():
                    assert read(document) == json.loads(document)
