"""What the edge makes of the parameters that say what an answer must be: the grammar that reaches the engine, and what
is refused by which name."""

import json
from typing import Any

import httpx
import openai
import pydantic
import pytest

from aerie.cluster.http.app import build_app
from aerie.cluster.http.errors import unsupported
from aerie.cluster.http.requests.grammar_checker import GrammarChecker
from aerie.workers.scheduling.plan import Grammar
from tests.support.edge_client import CHAT, HELLO, MODEL, PROMPT, TEXT, edge_config, in_process, served
from tests.support.fake_engine import EOS, FakeEngine, chat_tokenizer, says, small_tokenizer

END = (small_tokenizer().token_to_id(EOS),)
PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TAG = {"structures": [{"begin": "<f>", "schema": PERSON, "end": "</f>"}], "triggers": ["<f"]}


def schema_grammar(schema: Any, any_whitespace: bool = True) -> Grammar:
    text = json.dumps(schema, separators=(",", ":"))
    return Grammar("json_schema", text, END, any_whitespace)


OBJECT = schema_grammar({"type": "object", "additionalProperties": True})
ASKED: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, OBJECT),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": PERSON}}},
        schema_grammar(PERSON),
    ),
    ({"structured_outputs": {}}, None),
    ({"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}}, schema_grammar(PERSON, False)),
    ({"structured_outputs": {"json": json.dumps(PERSON)}}, schema_grammar(PERSON)),
    ({"structured_outputs": {"json_object": True, "regex": None}}, OBJECT),
    ({"structured_outputs": {"regex": "[ab]+"}}, Grammar("regex", "[ab]+", END)),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, Grammar("choice", '["yes", "no"]', END)),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Grammar("ebnf", 'root ::= "a"', END)),
    ({"guided_json": PERSON}, schema_grammar(PERSON)),
    ({"guided_regex": "a"}, Grammar("regex", "a", END)),
    ({"guided_choice": ["a"]}, Grammar("choice", '["a"]', END)),
    ({"guided_grammar": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"', END)),
    ({"json_schema": json.dumps(PERSON)}, schema_grammar(PERSON)),
    ({"regex": "a"}, Grammar("regex", "a", END)),
    ({"ebnf": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"', END)),
    (
        {"response_format": {"type": "structural_tag", **TAG}},
        Grammar("structural_tag", json.dumps({"type": "structural_tag", **TAG}), END),
    ),
    (
        {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
        Grammar("structural_tag", json.dumps({"type": "structural_tag", **TAG}), END),
    ),
]


@pytest.mark.parametrize(("asked", "grammar"), ASKED, ids=lambda value: str(value)[:50])
async def test_grammar_reaches_the_engine(asked: dict[str, Any], grammar: Grammar | None) -> None:
    engine = FakeEngine(says("x"))
    async with in_process(engine) as client:
        for route, body in ((CHAT, HELLO), (TEXT, PROMPT)):
            reply = await client.post(route, json=body | asked | {"n": 2})
            assert reply.status_code == 200, reply.text
    assert [call.sampling.grammar for call in engine.calls] == [grammar] * 4


class _RefusesAll(GrammarChecker):
    async def check(self, grammar: Grammar, param: str) -> None:
        raise unsupported(param, "never")


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        *((CHAT, HELLO | asked, next(iter(asked))) for asked, grammar in ASKED[1:8] if grammar),
        *((TEXT, PROMPT | asked, next(iter(asked))) for asked, grammar in ASKED[8:] if grammar),
        (CHAT, HELLO | {"allowed_token_ids": [5]}, "allowed_token_ids"),
        (TEXT, PROMPT | {"bad_words": ["a"]}, "bad_words"),
        ("/generate", {"text": "a", "sampling_params": {"regex": "a"}}, "sampling_params.regex"),
        ("/generate", {"text": ["a"], "sampling_params": [{"ebnf": "root ::= x"}]}, "sampling_params[0].ebnf"),
        ("/generate", {"text": "a", "sampling_params": {"structural_tag": TAG}}, "sampling_params.structural_tag"),
        (
            "/v1/responses",
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "p", "schema": PERSON}}},
            "text.format",
        ),
    ],
)
async def test_a_grammar_that_cannot_be_used_is_named_by_its_own_parameter(
    route: str, body: dict[str, Any], param: str
) -> None:
    app = build_app(edge_config(), chat_tokenizer(), FakeEngine(says("x")), grammars=_RefusesAll())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://edge") as client:
        reply = await client.post(route, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def json_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


SCHEMA = "response_format.json_schema.schema"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "must be one of text, json_object"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "`schema`"),
    ({"response_format": {"type": "structural_tag"}}, "response_format", "`triggers`"),
    ({"structured_outputs": {"json": PERSON, "regex": "a"}}, "structured_outputs", "cannot be combined with json"),
    ({"structured_outputs": {"xml": 1}}, "structured_outputs.xml", "Unknown parameter"),
    (
        {"structured_outputs": {"json": PERSON, "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
        "use disable_any_whitespace",
    ),
    ({"guided_json": PERSON, "guided_regex": "a"}, "guided_regex", "cannot be combined with guided_json"),
    ({"guided_json": "{"}, "guided_json", "is not JSON"),
    ({"guided_choice": []}, "guided_choice", "1 to 1024 strings"),
    ({"guided_choice": ["a", 1]}, "guided_choice", "1 to 1024 strings"),
    ({"guided_regex": ""}, "guided_regex", "not empty"),
    ({"guided_regex": "a" * 200}, "guided_regex", "larger than 150 bytes (ingress.max_grammar_bytes)"),
    ({"guided_regex": "a", "ignore_eos": True}, "guided_regex", "leave out ignore_eos"),
    ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "says where it may end"),
    (json_schema({"type": "array", "uniqueItems": True}), SCHEMA, "uniqueItems at #: it is not enforced"),
    (json_schema(False), SCHEMA, "false at #"),
    (
        json_schema({"type": "array", "items": {"type": "array", "items": {"type": "array", "items": {}}}}),
        SCHEMA,
        "nested more than 3 deep",
    ),
]


@pytest.mark.parametrize(("asked", "param", "message"), REFUSED, ids=lambda value: str(value)[:40])
async def test_what_cannot_be_honoured_is_refused_by_name(asked: dict[str, Any], param: str, message: str) -> None:
    async with in_process(FakeEngine(says("x")), max_grammar_bytes=150, max_schema_depth=3) as client:
        for route, body in ((CHAT, HELLO), (TEXT, PROMPT)):
            reply = await client.post(route, json=body | asked)
            error = reply.json()["error"]
            assert (reply.status_code, error["param"]) == (400, param)
            assert message in error["message"]


class _Named(pydantic.BaseModel):
    name: str


@pytest.mark.parametrize("stream", [True, False])
async def test_openais_parse_gives_the_model_it_asks_for(stream: bool) -> None:
    engine = FakeEngine(says('{"na', 'me": "A', 'nn"}'))
    async with (
        served(engine, max_model_len=2048) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-") as client,
    ):
        asked: Any = {"model": MODEL, "messages": HELLO["messages"], "response_format": _Named}
        if stream:
            async with client.chat.completions.stream(**asked) as events:
                reply = await events.get_final_completion()
        else:
            reply = await client.chat.completions.parse(**asked)
    assert reply.choices[0].message.parsed == _Named(name="Ann")
    grammar = engine.calls[0].sampling.grammar
    assert grammar is not None and json.loads(grammar.text)["required"] == ["name"]
