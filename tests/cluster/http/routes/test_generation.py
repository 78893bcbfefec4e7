"""Replies of the generation routes, whole and streamed, over a scripted engine."""

from typing import Any

import pytest

from aerie.cluster.transport.messages import SpeculationStats, TokenDelta
from aerie.workers.scheduling.plan import TokenLogprobs
from tests.support.edge_client import CHAT, HELLO, MODEL, PROMPT, TEXT, events, in_process, streamed, streamed_text
from tests.support.fake_engine import EOS, FakeEngine, Step, says, small_tokenizer, small_tokens

STATS = SpeculationStats(num_rounds=4, histogram=(1, 1, 2), num_draft_tokens=2, num_drafted=8)
METRICS = {
    "mean_acceptance_length": 2.25,
    "draft_acceptance_rate": 0.625,
    "acceptance_histogram": [1, 1, 2],
    "num_spec_steps": 4,
    "num_accepted_draft_tokens": 5,
    "num_draft_tokens": 8,
    "num_spec_tokens": 2,
}
HELLO_WORLD = says("hello", " wor", "ld ä", cached_tokens=16, speculation=STATS)


async def _post(engine: FakeEngine, route: str, body: dict[str, Any], **config: Any) -> Any:
    async with in_process(engine, **config) as client:
        reply = await client.post(route, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_chat_reply() -> None:
    reply = await _post(FakeEngine(HELLO_WORLD), CHAT, HELLO)
    assert reply.pop("id").startswith("chatcmpl-")
    assert reply.pop("created") > 1_700_000_000
    num_tokens = len(small_tokens("hello") + small_tokens(" wor") + small_tokens("ld ä")) + 1
    assert reply == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "hello world ä",
                    "refusal": None,
                    "reasoning": None,
                    "reasoning_content": None,
                },
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "matched_stop": small_tokenizer().token_to_id(EOS),
                "token_ids": None,
            }
        ],
        "prompt_token_ids": None,
        "prompt_logprobs": None,
        "usage": {
            "prompt_tokens": 21,
            "completion_tokens": num_tokens,
            "total_tokens": 21 + num_tokens,
            "prompt_tokens_details": {"cached_tokens": 16},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        "metrics": {"speculative_decoding": METRICS},
    }


async def test_chat_stream_has_role_pieces_finish_and_usage_in_this_order() -> None:
    body = HELLO | {"stream_options": {"include_usage": True}}
    chunks = await streamed(FakeEngine(HELLO_WORLD), CHAT, body)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": "", "reasoning_content": None},
        {"content": "hello"},
        {"content": " wor"},
        {"content": "ld ä"},
        {"reasoning_content": None},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * 4 + ["stop"]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 5
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == (await _post(FakeEngine(HELLO_WORLD), CHAT, HELLO))["usage"]
    assert chunks[-1]["metrics"] == {"speculative_decoding": METRICS}


async def test_stream_without_usage_has_the_speculation_metrics_on_its_last_chunk() -> None:
    chunks = await streamed(FakeEngine(HELLO_WORLD), TEXT, PROMPT)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["hello", " wor", "ld ä"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert chunks[-1]["metrics"] == {"speculative_decoding": METRICS}
    assert all("usage" not in chunk for chunk in chunks)


async def test_continuous_usage_counts_up() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await streamed(FakeEngine(says("a", "bc", finish="length")), TEXT, PROMPT | {"stream_options": options})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 3, 3]
    alone = PROMPT | {"stream_options": {"continuous_usage_stats": True}}
    chunks = await streamed(FakeEngine(says("a", finish="length")), TEXT, alone)
    assert not any("usage" in chunk for chunk in chunks), "as with vLLM, only beside include_usage"


@pytest.mark.parametrize("route_body", [(CHAT, HELLO), (TEXT, PROMPT)])
async def test_streamed_text_tokens_and_logprobs_add_up_to_the_whole_reply(route_body: Any) -> None:
    route, body = route_body
    logprobs = {"logprobs": True, "top_logprobs": 2} if route == CHAT else {"logprobs": 2}
    body = body | logprobs | {"return_token_ids": True, "stop": ["ld"], "n": 2}
    whole = await _post(FakeEngine(HELLO_WORLD), route, body)
    chunks = await streamed(FakeEngine(HELLO_WORLD), route, body)
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        text = choice["text"] if route == TEXT else choice["message"]["content"]
        assert streamed_text(chunks, choice["index"]) == text == "hello wor"
        assert sum((c.get("token_ids", []) for c in mine), []) == choice["token_ids"]
        assert len(choice["token_ids"]) == len(small_tokens("hello") + small_tokens(" wor")) + 1, (
            "ends with the stop's token"
        )
        parts = [c["logprobs"] for c in mine if c["logprobs"]]
        for name in ("content",) if route == CHAT else ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert sum((part[name] for part in parts), []) == choice["logprobs"][name]
            assert len(choice["logprobs"][name]) == len(choice["token_ids"])
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "ld")
        assert mine[-1]["finish_reason"] == "stop"
    prompt = chunks[0]["choices"][0]["prompt_token_ids"]
    assert prompt == (whole if route == CHAT else whole["choices"][0])["prompt_token_ids"]


async def test_chat_logprobs_have_tokens_bytes_and_alternatives() -> None:
    reply = await _post(FakeEngine(says("hä")), CHAT, HELLO | {"logprobs": True, "top_logprobs": 1})
    first, second, end = reply["choices"][0]["logprobs"]["content"]
    h = small_tokens("h")[0]
    same = {"token": "h", "logprob": -h / 100, "bytes": [104]}
    assert first == same | {"top_logprobs": [same]}
    assert (second["token"], second["bytes"]) == ("ä", [195, 164])
    assert end["token"] == "<|im_end|>"


async def test_legacy_logprobs_are_parallel_lists() -> None:
    reply = await _post(FakeEngine(says("hä", finish="length")), TEXT, PROMPT | {"logprobs": 0})
    logprobs = reply["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["h", "ä"],
        "token_logprobs": [-token / 100 for token in small_tokens("hä")],
        "top_logprobs": [{"h": -small_tokens("h")[0] / 100}, {"ä": -small_tokens("ä")[0] / 100}],
        "text_offset": [0, 1],
    }
    reply = await _post(FakeEngine(says("h", finish="length")), TEXT, PROMPT | {"logprobs": 2})
    assert [list(tops) for tops in reply["choices"][0]["logprobs"]["top_logprobs"]] == [["h", "i"]]


async def test_infinite_logprobs_become_a_number() -> None:
    def script(prompt: list[int], sampling: Any) -> list[Step]:
        return [TokenDelta("", (1,), "length", (TokenLogprobs(float("-inf")),))]

    reply = await _post(FakeEngine(script), TEXT, PROMPT | {"logprobs": 0})
    assert reply["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


async def test_several_choices_share_one_prompt_in_usage() -> None:
    engine = FakeEngine(says("ab", finish="length", cached_tokens=1, speculation=STATS))
    reply = await _post(engine, TEXT, PROMPT | {"prompt": ["xy", "z"], "n": 3})
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    assert reply["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 12,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert "metrics" not in reply, "the statistics of several choices are nobody's"
    assert [call.prompt for call in engine.calls] == [list(small_tokens("xy"))] * 3 + [list(small_tokens("z"))] * 3


@pytest.mark.parametrize("stream", [True, False])
async def test_stop_string_aborts_the_engine_at_once(stream: bool) -> None:
    engine = FakeEngine(says("abc", "def", *["x"] * 1000, delay_s=0.01))
    async with in_process(engine) as client:
        reply = await client.post(TEXT, json=PROMPT | {"stop": "e", "stream": stream, "max_tokens": 200})
    text = streamed_text(events(reply.text)) if stream else reply.json()["choices"][0]["text"]
    assert text == "abcd"
    assert engine.closed == [engine.calls[0].request_id]
    assert engine.num_active == 0
    if not stream:
        assert reply.json()["usage"] == {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}


async def test_special_tokens_are_shown_if_asked() -> None:
    body = PROMPT | {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert (await _post(FakeEngine(says("a")), TEXT, body))["choices"][0]["text"] == "a<|im_end|>"


async def test_echo_comes_first() -> None:
    body = PROMPT | {"prompt": ["ab", "c"], "echo": True}
    chunks = await streamed(FakeEngine(says("x")), TEXT, body)
    assert (streamed_text(chunks, 0), streamed_text(chunks, 1)) == ("abx", "cx")
