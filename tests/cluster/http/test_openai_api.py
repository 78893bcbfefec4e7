"""What the edge makes of parameters: what reaches the engine, and what is refused with status, form and parameter."""

import json
from typing import Any

import pytest

from cluster.http.request import choice_seed
from cluster.http.schema.request import REFUSED
from tests.support.edge_client import CHAT, HELLO, MODEL, PROMPT, TEXT, in_process
from tests.support.fake_engine import EOS, FakeEngine, says, small_tokenizer
from workers.scheduling.plan import MAX_STOP_TOKEN_IDS, SamplingParams

EOS_ID = small_tokenizer().token_to_id(EOS)
NAN = float("nan")


async def _sampling(route: str, body: dict[str, Any], **config: Any) -> list[SamplingParams]:
    engine = FakeEngine(says("x"))
    async with in_process(engine, **config) as client:
        reply = await client.post(route, json=body)
        assert reply.status_code == 200, reply.text
    return [call.sampling for call in engine.calls]


async def test_every_sampling_parameter_reaches_the_engine() -> None:
    (sampling,) = await _sampling(
        CHAT,
        HELLO
        | {
            "max_completion_tokens": 7,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "seed": -1,
            "presence_penalty": 1,
            "frequency_penalty": -2.0,
            "repetition_penalty": 1.5,
            "logit_bias": {"3": -100, "4": 5},
            "min_tokens": 2,
            "stop_token_ids": [9],
            "logprobs": True,
            "top_logprobs": 20,
            "speculative": False,
        },
    )
    assert sampling == SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=2**64 - 1,
        presence_penalty=1.0,
        frequency_penalty=-2.0,
        repetition_penalty=1.5,
        logit_bias={3: -100.0, 4: 5.0},
        min_tokens=2,
        stop_token_ids=(9, EOS_ID),
        logprobs=20,
        speculative=False,
    )


async def test_defaults_are_openais_or_the_configurations() -> None:
    (chat,) = await _sampling(CHAT, HELLO)
    assert (chat.temperature, chat.top_p, chat.top_k, chat.logprobs, chat.speculative) == (1.0, 1.0, 0, -1, True)
    assert chat.stop_token_ids == (EOS_ID,)
    assert chat.max_tokens == 256 - 21, "what is left of the model's length"
    (text,) = await _sampling(TEXT, PROMPT, default_temperature=0.25, default_top_k=20)
    assert (text.max_tokens, text.temperature, text.top_k) == (16, 0.25, 20)
    (text,) = await _sampling(TEXT, PROMPT | {"prompt": [1] * 250})
    assert text.max_tokens == 6


async def test_null_means_default() -> None:
    given = HELLO | dict.fromkeys(("temperature", "n", "stop", "seed", "tools", "stream", "max_tokens", "logit_bias"))
    (sampling,) = await _sampling(CHAT, given)
    assert (sampling.temperature, sampling.max_tokens) == (1.0, 235)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"temperature": 1e-7}, {"temperature": 0.0}),
        ({"top_p": 0}, {"top_p": 1.0, "top_k": 1}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"ignore_eos": True}, {"stop_token_ids": ()}),
        ({"ignore_eos": True, "stop_token_ids": [5, 5]}, {"stop_token_ids": (5,)}),
        ({"logprobs": True}, {"logprobs": 0}),
    ],
)
async def test_edge_values_are_translated(given: dict[str, Any], expected: dict[str, Any]) -> None:
    (sampling,) = await _sampling(CHAT, HELLO | given)
    assert {name: getattr(sampling, name) for name in expected} == expected


async def test_stop_tokens_fit_the_engines_row_together_with_the_models_own() -> None:
    (sampling,) = await _sampling(CHAT, HELLO | {"stop_token_ids": list(range(5, 5 + MAX_STOP_TOKEN_IDS - 1))})
    assert len(sampling.stop_token_ids) == MAX_STOP_TOKEN_IDS
    async with in_process(FakeEngine(says("x"))) as client:
        reply = await client.post(CHAT, json=HELLO | {"stop_token_ids": list(range(5, 5 + MAX_STOP_TOKEN_IDS))})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "stop_token_ids"


async def test_choices_have_their_own_seeds_and_repeat_with_the_request() -> None:
    first = await _sampling(CHAT, HELLO | {"n": 4, "seed": 11})
    again = await _sampling(CHAT, HELLO | {"n": 4, "seed": 11})
    assert [s.seed for s in first] == [s.seed for s in again] == [choice_seed(11, i) for i in range(4)]
    assert first[0].seed == 11
    assert len({s.seed for s in first}) == 4
    batch = await _sampling(TEXT, PROMPT | {"prompt": ["a", "b"], "seed": 11, "n": 2})
    assert [s.seed for s in batch] == [choice_seed(11, i) for i in (0, 1, 0, 1)], "as for each prompt alone"


async def test_without_a_seed_each_choice_is_random() -> None:
    """Two of 128 random 64-bit numbers are equal with a chance of 4e-16."""
    seeds = {s.seed for _ in range(2) for s in await _sampling(TEXT, PROMPT | {"prompt": ["a"] * 4, "n": 16})}
    assert len(seeds) == 128


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("ab", ["ab"]), (["ab", "c"], ["ab", "c"]), ([64, 65], ["ab"]), ([[64], [65, 66]], ["a", "bc"])],
)
async def test_prompts_of_every_form(prompt: Any, expected: list[str]) -> None:
    engine = FakeEngine(says("x"))
    async with in_process(engine) as client:
        reply = await client.post(TEXT, json=PROMPT | {"prompt": prompt, "echo": True})
    assert [choice["text"] for choice in reply.json()["choices"]] == [text + "x" for text in expected]
    assert [small_tokenizer().decode(call.prompt) for call in engine.calls] == expected


async def test_messages_of_every_form() -> None:
    engine = FakeEngine(says("x"))
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "eve"},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]},
        {"role": "tool", "content": "t", "tool_call_id": "1"},
    ]
    async with in_process(engine) as client:
        reply = await client.post(CHAT, json=HELLO | {"messages": messages})
    assert reply.status_code == 200, reply.text
    prompt = small_tokenizer().decode(engine.calls[0].prompt, skip_special_tokens=False)
    assert prompt == (
        "<|im_start|>system\nd<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>tool\nt<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("name", sorted(REFUSED))
async def test_refused_parameters_are_named_unless_they_ask_for_nothing(name: str) -> None:
    reason, harmless = REFUSED[name]
    async with in_process(FakeEngine(says("x"))) as client:
        for route, body in ((CHAT, HELLO), (TEXT, PROMPT)):
            reply = await client.post(route, json=body | {name: {"asks": "for much"}})
            error = reply.json()["error"]
            assert (reply.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter")
            assert error["message"] == f"{name} is not supported: {reason}"
            for value in (None, *harmless):
                assert (await client.post(route, json=body | {name: value})).status_code == 200, value


@pytest.mark.parametrize(
    "extra",
    [
        {"user": "u"},
        {"metadata": {"a": "b"}},
        {"store": False},
        {"safety_identifier": "s"},
        {"prompt_cache_key": "k"},
        {"stream": False},
        {"n": 1},
        {"logprobs": False, "top_logprobs": 0},
        {"request_id": "mine"},
        {"stop": ["a"] * 16},
        {"logit_bias": {}},
        {"seed": 2**64 - 1},
    ],
)
async def test_harmless_parameters_are_accepted(extra: dict[str, Any]) -> None:
    await _sampling(CHAT, HELLO | extra)


BAD_SHARED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_p": -1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 1.0}, "max_tokens"),
    ({"max_tokens": 2**70}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": 10**6}, "n"),
    ({"n": "2"}, "n"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [0, 10**9]}, "stop_token_ids[1]"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"stream_options": []}, "stream_options"),
    ({"speculative": "no"}, "speculative"),
    ({"request_id": "a b"}, "request_id"),
    ({"request_id": ""}, "request_id"),
    ({"model": 5}, "model"),
    ({"user": 5}, "user"),
    ({"surprise": 1}, "surprise"),
    ({"Temperature": 1}, "Temperature"),
]
BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"prompt": "x"}, "prompt"),
    ({"echo": True}, "echo"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"a": []}}, "chat_template_kwargs.a"),
    ({"best_of": 1}, "best_of"),
]
BAD_TEXT: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt[1]"),
    ({"prompt": [5, "a"]}, "prompt[1]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [10**30]}, "prompt[0]"),
    ({"prompt": [[0], [10**6]]}, "prompt[1][0]"),
    ({"prompt": [0.5]}, "prompt[0]"),
    ({"prompt": [[0], "a"]}, "prompt[1]"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": ["a"] * 20, "n": 8}, "n"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"best_of": 2}, "best_of"),
    ({"n": 2, "best_of": 3}, "best_of"),
    ({"echo": True, "logprobs": 1}, "echo"),
    ({"messages": []}, "messages"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
]
BAD = (
    [(CHAT, HELLO | extra, param) for extra, param in BAD_SHARED + BAD_CHAT]
    + [(TEXT, PROMPT | extra, param) for extra, param in BAD_SHARED + BAD_TEXT]
    + [(CHAT, {"messages": HELLO["messages"]}, "model"), (CHAT, {"model": MODEL}, "messages")]
)


@pytest.mark.parametrize(("route", "body", "param"), BAD)
async def test_bad_input_is_400_in_openais_form_with_the_parameter(route: str, body: Any, param: str) -> None:
    engine = FakeEngine(says("x"))
    async with in_process(engine) as client:
        reply = await client.post(route, json=body)
    assert reply.status_code == 400, reply.text
    assert set(reply.json()) == {"error"}
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert param.partition(".")[0].partition("[")[0] in error["message"]
    assert not engine.calls


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({f"u{i}": 0 for i in range(200)}, None),
        ({"messages": [{"role": "user", "content": "x"}] * 4097}, "messages"),
        ({"messages": [HELLO["messages"][0] | {f"u{i}": 0 for i in range(40)}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 4097}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}] * 129}]}, "messages[0].tool_calls"),
        ({"logit_bias": {str(i): "a" for i in range(1025)}}, "logit_bias"),
        ({"stream_options": {str(i): 1 for i in range(1025)}}, "stream_options"),
    ],
)
async def test_more_elements_than_an_honest_request_has_are_refused(extra: dict[str, Any], param: str | None) -> None:
    async with in_process(FakeEngine(says("x"))) as client:
        reply = await client.post(CHAT, json=HELLO | extra)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert " at most " in reply.text


async def test_all_unknown_parameters_are_named_at_once() -> None:
    async with in_process(FakeEngine(says("x"))) as client:
        error = (await client.post(CHAT, json=HELLO | {"foo": 1, "bar": 2})).json()["error"]
    assert error["message"] == "Unknown parameter: foo, bar"
    assert error["code"] == "unknown_parameter"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": "\\ud800"}',
        b'{"\\udfff": 1}',
        b'{"a": 1e999}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b"\xff\xfe",
        b'"\xed\xa0\x80"',
        b"{'a': 1}",
        b"\x00",
        json.dumps({"temperature": NAN}).encode(),
    ],
)
async def test_bodies_that_are_no_json_object_are_400(raw: bytes) -> None:
    async with in_process(FakeEngine(says("x"))) as client:
        for route in (CHAT, TEXT, "/tokenize", "/detokenize"):
            reply = await client.post(route, content=raw)
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_json"), raw[:20]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"prompt": [1] * 256},
            "maximum context length is 256 tokens, prompt and answer together, but the prompt alone has 256",
        ),
        ({"prompt": [1] * 200, "max_tokens": 57}, "wants 257: 200 in the prompt and 57 in the answer"),
    ],
)
async def test_too_long_is_context_length_exceeded_with_the_lengths(body: dict[str, Any], message: str) -> None:
    async with in_process(FakeEngine(says("x"))) as client:
        reply = await client.post(TEXT, json=PROMPT | body)
        assert (await client.post(TEXT, json=PROMPT | {"prompt": [1] * 200, "max_tokens": 56})).status_code == 200
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert message in error["message"]


async def test_unknown_model_is_404_with_the_model_there_is() -> None:
    async with in_process(FakeEngine(says("x"))) as client:
        reply = await client.post(CHAT, json=HELLO | {"model": "gpt"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert reply.json()["error"]["message"] == f"The model 'gpt' does not exist here; this server serves '{MODEL}'"
