"""Parameters of requests: those that reach the engine, and those that are refused with status and name."""

import json
from typing import Any

import pytest

from aerie.cluster.http.requests.parameters import choice_seed
from aerie.workers.scheduling.plan import MAX_STOP_TOKEN_IDS, SamplingParams
from tests.support.edge_client import CHAT, HELLO, MODEL, PROMPT, TEXT, in_process
from tests.support.fake_engine import EOS, FakeEngine, chat_tokenizer, says, small_tokenizer

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


@pytest.mark.parametrize("model", [{}, {"model": None}])
@pytest.mark.parametrize(
    ("route", "body"),
    [(CHAT, {"messages": HELLO["messages"]}), (TEXT, {"prompt": "hi"}), ("/v1/responses", {"input": "hi"})],
)
async def test_without_a_name_the_model_that_is_served_answers(
    route: str, body: dict[str, Any], model: dict[str, Any]
) -> None:
    async with in_process(FakeEngine(says("x"))) as client:
        reply = await client.post(route, json=body | model)
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == MODEL


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
        ({"ignore_eos": True, "stop_token_ids": [10**9, 5]}, {"stop_token_ids": (5,)}),  # another model's
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
        {"service_tier": "flex"},
        {"verbosity": "low"},
        {"prompt_cache_retention": "24h"},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"tool_choice": "auto", "parallel_tool_calls": False},
        {"bad_words": []},
        {"add_special_tokens": False},
    ],
)
async def test_harmless_parameters_are_accepted(extra: dict[str, Any]) -> None:
    await _sampling(CHAT, HELLO | extra)


async def test_only_the_end_of_a_long_prompt_is_kept_if_asked_for() -> None:
    engine = FakeEngine(says("x"))
    async with in_process(engine) as client:
        for limit, max_tokens in ((2, 5), (-1, 56), (-1, None), (1000, 5)):
            body = PROMPT | {"prompt": [*range(100)] * 3, "truncate_prompt_tokens": limit, "max_tokens": max_tokens}
            if limit == 1000:
                body["prompt"] = [1, 2]
            assert (await client.post(TEXT, json=body)).status_code == 200
        zero = await client.post(TEXT, json=PROMPT | {"truncate_prompt_tokens": 0})
    assert [len(call.prompt) for call in engine.calls] == [2, 200, 255, 2]
    assert engine.calls[0].prompt == [98, 99]
    assert zero.json()["error"]["param"] == "truncate_prompt_tokens"


async def test_tokens_can_be_named_by_their_ids() -> None:
    async with in_process(FakeEngine(says("ab"))) as client:
        body = {"return_tokens_as_token_ids": True}
        chat = (await client.post(CHAT, json=HELLO | body | {"logprobs": True, "top_logprobs": 1})).json()
        text = (await client.post(TEXT, json=PROMPT | body | {"logprobs": 1})).json()
    entries = chat["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["token_id:64", "token_id:65", f"token_id:{EOS_ID}"]
    assert entries[0]["bytes"] == [97] and entries[0]["top_logprobs"][0]["token"] == "token_id:64"
    logprobs = text["choices"][0]["logprobs"]
    assert logprobs["tokens"][:2] == ["token_id:64", "token_id:65"] and "token_id:64" in logprobs["top_logprobs"][0]


async def test_allowed_tokens_and_bad_words_are_a_constraint() -> None:
    (allowed,) = await _sampling(TEXT, PROMPT | {"allowed_token_ids": [5, 9]})
    (bad,) = await _sampling(CHAT, HELLO | {"bad_words": ["cat"]})
    assert allowed.grammar is not None and bad.grammar is not None
    each = [{"type": "token", "token": token} for token in (5, 9)]
    assert json.loads(allowed.grammar.text)["format"] == {
        "type": "plus",
        "content": {"type": "or", "elements": each},
    }
    assert json.loads(bad.grammar.text)["format"] == {"type": "any_text", "excludes": ["cat"]}
    async with in_process(FakeEngine(says("x"))) as client:
        both = await client.post(TEXT, json=PROMPT | {"allowed_token_ids": [5], "guided_regex": "a"})
        unknown = await client.post(TEXT, json=PROMPT | {"allowed_token_ids": [10**6]})
    assert both.json()["error"]["param"] == "allowed_token_ids"
    assert unknown.json()["error"]["param"] == "allowed_token_ids[0]"


async def test_a_salt_reaches_the_prefix_cache_and_hides_what_it_is() -> None:
    salts = [
        (await _sampling(TEXT, PROMPT | extra))[0].cache_salt
        for extra in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"})
    ]
    assert salts[0] == b"" and salts[1] == salts[3] and len(set(salts)) == 3
    assert all(b"a" not in salt or len(salt) == 16 for salt in salts)


async def test_defaults_are_the_models_where_the_configuration_has_none() -> None:
    """As Qwen3.5's generation_config.json has them, whose repetition penalty is the default anyway."""
    base = chat_tokenizer()
    recommended = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.0}
    base.sampling_defaults = recommended
    engine = FakeEngine(says("x"))
    async with in_process(engine, base, default_top_p=0.5) as client:
        await client.post(CHAT, json=HELLO)
        await client.post(CHAT, json=HELLO | {"temperature": 0, "top_k": -1})
    first, second = (call.sampling for call in engine.calls)
    assert (first.temperature, first.top_p, first.top_k, first.repetition_penalty) == (0.6, 0.5, 20, 1.0)
    assert (second.temperature, second.top_p, second.top_k) == (0.0, 0.5, 0)


def test_a_recommendation_out_of_range_names_the_file() -> None:
    base = chat_tokenizer()
    base.sampling_defaults = {"temperature": 5.0}
    with pytest.raises(
        ValueError, match=r"generation_config.json: default_temperature=5.0: must be at least 0 and at most 2"
    ):
        in_process(FakeEngine(says("x")), base)
