"""SGLang's own routes: /generate in its form, and what its clients ask for before they begin."""

from typing import Any

import httpx
import pytest

from aerie.cluster.http.app import build_app
from aerie.cluster.http.errors import ApiError
from aerie.cluster.transport.messages import SpeculationStats
from aerie.workers.scheduling.plan import Grammar
from tests.support.edge_client import CHAT, HELLO, MODEL, edge_config, events, in_process
from tests.support.fake_engine import EOS, FakeEngine, chat_tokenizer, says, small_tokenizer

END = small_tokenizer().token_to_id(EOS)


def _ids(text: str) -> list[int]:
    return small_tokenizer().encode(text, add_special_tokens=False).ids  # type: ignore[no-any-return]


async def _generated(body: dict[str, Any], engine: FakeEngine | None = None) -> Any:
    async with in_process(engine or FakeEngine(says("ab", "c", cached_tokens=1))) as client:
        reply = await client.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_one_prompt_gets_one_answer() -> None:
    engine = FakeEngine(says("ab", "c", cached_tokens=1))
    found = await _generated({"text": "hello", "rid": "mine", "sampling_params": {"temperature": 0}}, engine)
    meta = found["meta_info"]
    assert (found["text"], found["output_ids"]) == ("abc", [*_ids("abc"), END])
    assert meta.pop("e2e_latency") >= 0
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "stop", "matched": END},
        "prompt_tokens": 1,
        "completion_tokens": 4,
        "cached_tokens": 1,
    }
    call = engine.calls[0]
    assert (call.prompt, call.sampling.max_tokens, call.sampling.temperature) == (_ids("hello"), 128, 0.0)


async def test_sampling_parameters_have_sglangs_names() -> None:
    engine = FakeEngine(says("abc", finish="length"))
    params = {
        "max_new_tokens": 7,
        "min_new_tokens": 2,
        "sampling_seed": 5,
        "top_k": -1,
        "top_p": 0.5,
        "stop": ["x"],
        "stop_token_ids": [9],
        "ignore_eos": True,
        "repetition_penalty": 1.5,
    }
    found = await _generated({"input_ids": [98, 99], "sampling_params": params}, engine)
    sampling = engine.calls[0].sampling
    assert engine.calls[0].prompt == [98, 99]
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed, sampling.top_p) == (7, 2, 5, 0.5)
    assert (sampling.stop_token_ids, sampling.repetition_penalty) == ((9,), 1.5)
    assert found["meta_info"]["finish_reason"] == {"type": "length", "length": 3}


async def test_a_list_of_prompts_gets_a_list_of_answers() -> None:
    found = await _generated({"text": ["hello", "hello world"]})
    assert [answer["meta_info"]["prompt_tokens"] for answer in found] == [1, 2]
    assert [answer["text"] for answer in found] == ["abc", "abc"]
    assert len(await _generated({"text": ["hello"]})) == 1
    assert len(await _generated({"input_ids": [[98], [99]]})) == 2
    assert len(await _generated({"text": "hello", "sampling_params": {"n": 3}})) == 3


async def test_each_prompt_may_have_its_own_sampling_parameters() -> None:
    engine = FakeEngine(says("ab", "c"))
    params = [
        {"max_new_tokens": 7, "n": 2, "stop": "b", "sampling_seed": 5, "stop_token_ids": [9]},
        {"max_new_tokens": 5, "n": 2, "regex": "abc"},
        {"max_new_tokens": 0, "n": 2, "ignore_eos": True},
    ]
    found = await _generated({"text": ["hello", "a", "hello world"], "sampling_params": params}, engine)
    calls = sorted(engine.calls, key=lambda call: int(call.request_id.rpartition("-")[2]))
    assert [call.prompt for call in calls] == [_ids(text) for text in ("hello", "a", "hello world") for _ in range(2)]
    assert [call.sampling.max_tokens for call in calls] == [7, 7, 5, 5, 1, 1]
    assert [call.sampling.stop_token_ids for call in calls] == 2 * [(9, END)] + 2 * [(END,)] + 2 * [()]
    assert [call.sampling.grammar is None for call in calls] == [True, True, False, False, True, True]
    assert calls[0].sampling.seed == 5
    assert [answer["text"] for answer in found] == ["a", "a", "abc", "abc", "", ""]
    assert found[0]["meta_info"]["finish_reason"] == {"type": "stop", "matched": "b"}
    assert [answer["meta_info"]["completion_tokens"] for answer in found[4:]] == [0, 0]


async def test_every_grammar_of_a_list_is_checked() -> None:
    class Checker:
        async def check(self, grammar: Grammar, param: str) -> None:
            if grammar.text == "b":
                raise ApiError(400, "slow")

    engine = FakeEngine(says("x"))
    body = {"text": ["a", "b"], "sampling_params": [{"regex": "a"}, {"regex": "b"}]}
    app = build_app(edge_config(), chat_tokenizer(), engine, grammars=Checker())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://edge") as client:
        reply = await client.post("/generate", json=body)
    assert (reply.json()["error"]["message"], engine.calls) == ("slow", [])


@pytest.mark.parametrize(("prompt", "num"), [("hello", 1), (["hello", "a"], 2)])
async def test_events_repeat_what_came_before_and_the_last_says_why_it_ends(prompt: Any, num: int) -> None:
    async with in_process(FakeEngine(says("ab", "c", delay_s=0.01))) as client:
        reply = await client.post("/generate", json={"text": prompt, "stream": True})
    by_index: dict[int, list[Any]] = {}
    for found in events(reply.text):
        by_index.setdefault(found.get("index", 0), []).append(found)
    assert len(by_index) == num
    for found in by_index.values():
        assert [each["text"] for each in found] == ["ab", "abc"]
        assert found[0]["meta_info"]["finish_reason"] is None
        assert found[-1]["meta_info"]["finish_reason"]["type"] == "stop"
        assert found[-1]["output_ids"] == [*_ids("abc"), END]


async def test_log_probabilities_are_triples() -> None:
    body = {"text": "hello", "return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    meta = (await _generated(body))["meta_info"]
    entries, tops = meta["output_token_logprobs"], meta["output_top_logprobs"]
    assert [token for _, token, _ in entries] == [*_ids("abc"), END]
    assert [text for _, _, text in entries[:3]] == ["a", "b", "c"] and all(value <= 0 for value, _, _ in entries)
    assert [len(top) for top in tops] == [2] * 4
    plain = (await _generated({"text": "hello", "return_logprob": True}))["meta_info"]
    assert plain["output_token_logprobs"][0][2] is None and "output_top_logprobs" not in plain


async def test_the_prompts_log_probabilities_begin_where_they_are_wanted() -> None:
    body = {"text": "hello world", "return_logprob": True, "logprob_start_len": 0, "return_text_in_logprobs": True}
    prompt = _ids("hello world")
    meta = (await _generated(body | {"top_logprobs_num": 2}))["meta_info"]
    entries, tops = meta["input_token_logprobs"], meta["input_top_logprobs"]
    assert [token for _, token, _ in entries] == prompt and "".join(text for _, _, text in entries) == "hello world"
    assert entries[0][0] is None and all(value <= 0 for value, _, _ in entries[1:])
    assert tops[0] is None and [len(top) for top in tops[1:]] == [2] * (len(prompt) - 1)
    for start in (1, len(prompt), 10**6):
        later = (await _generated(body | {"logprob_start_len": start}))["meta_info"]
        assert later["input_token_logprobs"] == entries[start:] and "input_top_logprobs" not in later
    for without in ({"return_logprob": False}, {"logprob_start_len": -1}):
        engine = FakeEngine(says("a"))
        assert "input_token_logprobs" not in (await _generated(body | without, engine))["meta_info"]
        assert engine.calls[0].sampling.prompt_logprobs == -1


async def test_a_prompt_is_scored_alone() -> None:
    params = {"max_new_tokens": 0}
    body = {"text": "hello", "return_logprob": True, "logprob_start_len": 0, "sampling_params": params}
    found = await _generated(body)
    meta = found["meta_info"]
    assert (found["text"], found["output_ids"], meta["completion_tokens"]) == ("", [], 0)
    assert [token for _, token, _ in meta["input_token_logprobs"]] == _ids("hello")
    assert meta["output_token_logprobs"] == []
    async with in_process(FakeEngine(says("ab", "c"))) as client:
        streamed = await client.post("/generate", json={"text": "hello", "stream": True, "sampling_params": params})
    assert [each["output_ids"] for each in events(streamed.text)] == [[]]


async def test_speculation_has_sglangs_names() -> None:
    stats = SpeculationStats(num_rounds=4, histogram=(1, 0, 2, 1), num_draft_tokens=3, num_drafted=12)
    meta = (await _generated({"text": "a"}, FakeEngine(says("ab", "c", cached_tokens=0, speculation=stats))))[
        "meta_info"
    ]
    assert (meta["spec_verify_ct"], meta["spec_draft_token_num"], meta["spec_accept_token_num"]) == (4, 12, 7)
    assert meta["spec_accept_length"] == 2.75


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": 5}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": [10**6]}, None),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 9999}}, None),
        ({"text": "a", "sampling_params": {"stop": [""]}}, "sampling_params.stop"),
        ({"text": "a", "sampling_params": {"stop_regex": "x"}}, "sampling_params.stop_regex"),
        ({"text": "a", "sampling_params": {"json_schema": "{"}}, "sampling_params.json_schema"),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": ["a"], "sampling_params": []}, "sampling_params"),
        ({"text": [], "sampling_params": []}, "text"),
        ({"text": [["a", "b"], "c"], "sampling_params": [{}, {}]}, "text[0]"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"n": 2}]}, "sampling_params[1].n"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"stop": [""]}]}, "sampling_params[1].stop"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"max_new_tokens": -1}]}, "sampling_params[1].max_new_tokens"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"custom_params": 1}]}, "sampling_params[1].custom_params"),
        ({"text": "a", "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "a", "logprob_start_len": 0, "return_logprob": True, "stream": True}, "logprob_start_len"),
        ({"text": "a", "image_data": "x"}, "image_data"),
    ],
)
async def test_what_cannot_be_is_a_400_by_its_name(body: dict[str, Any], param: str | None) -> None:
    engine = FakeEngine(says("x"))
    async with in_process(engine) as client:
        reply = await client.post("/generate", json=body)
    assert (reply.status_code, engine.calls) == (400, [])
    if param is not None:
        assert reply.json()["error"]["param"].startswith(param), reply.text


async def test_the_model_is_told() -> None:
    async with in_process(FakeEngine(says("x"))) as client:
        for path in ("/get_model_info", "/model_info"):
            found = (await client.get(path)).json()
            assert (found["model_path"], found["is_generation"], found["max_model_len"]) == (MODEL, True, 256)
        assert (await client.post(CHAT, json=HELLO)).status_code == 200
