"""vLLM's /inference/v1/generate, and `return_weight_versions` elsewhere."""

from typing import Any

import pytest

from aerie.cluster.transport.messages import TokenDelta
from aerie.workers.scheduling.plan import SamplingParams, TokenLogprobs
from tests.support.edge_client import CHAT, HELLO, PROMPT, TEXT, events, in_process
from tests.support.fake_engine import FakeEngine

ROUTE = "/inference/v1/generate"
LOGPROBS = tuple(TokenLogprobs(-0.5 * i, (i, 9), (-0.5 * i, -4.0)) for i in range(1, 6))
DELTAS = [
    TokenDelta("", (70, 71), logprobs=LOGPROBS[:2]),
    TokenDelta("", (72,), logprobs=LOGPROBS[2:3], weight_versions=(("step-1", 1),)),
    TokenDelta("", (73, 74), "length", logprobs=LOGPROBS[3:], weight_versions=(("step-1", 1), ("step-2", 1))),
]
VERSIONS = [
    {"version": "0", "start": 0, "end": 2},
    {"version": "step-1", "start": 2, "end": 4},
    {"version": "step-2", "start": 4, "end": 5},
]


def engine() -> FakeEngine:
    return FakeEngine(lambda prompt, sampling: DELTAS)


@pytest.mark.parametrize("stream", [True, False])
async def test_ids_come_back_with_log_probabilities_and_versions(stream: bool) -> None:
    served = engine()
    sampling = {
        "max_tokens": 5,
        "temperature": 0.7,
        "seed": 3,
        "logprobs": 1,
        "stop_token_ids": [9],
        "detokenize": False,
    }
    body = {"token_ids": [5, 6, 7], "sampling_params": sampling, "stream": stream, "request_id": "r", "priority": 0}
    async with in_process(served) as client:
        reply = await client.post(ROUTE, json=body)
    assert reply.status_code == 200 and "x-aerie-ignored" not in reply.headers
    replies = events(reply.text) if stream else [reply.json()]
    choices = [choice for each in replies for choice in each["choices"]]
    assert sum((choice["token_ids"] for choice in choices), []) == [70, 71, 72, 73, 74]
    content = [entry for choice in choices for entry in choice["logprobs"]["content"]]
    assert [entry["token_id"] for entry in content] == [70, 71, 72, 73, 74]
    assert [entry["logprob"] for entry in content] == [entry.logprob for entry in LOGPROBS]
    assert content[0]["top_logprobs"] == [{"token": "token_id:1", "token_id": 1, "logprob": -0.5}]
    assert [choice["finish_reason"] for choice in choices][-1] == "length"
    assert choices[-1]["weight_versions"] == VERSIONS
    (call,) = served.calls
    assert call.prompt == [5, 6, 7] and call.sampling.temperature == 0.7 and 9 in call.sampling.stop_token_ids
    assert call.sampling.logprobs == 1 and call.sampling.max_tokens == 5


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"sampling_params": {}}, "token_ids"),
        ({"token_ids": [1], "sampling_params": {"temperature": 9.0}}, "sampling_params.temperature"),
        ({"token_ids": [1], "sampling_params": {"prompt_logprobs": 1}}, "sampling_params.prompt_logprobs"),
        ({"token_ids": [10**9], "sampling_params": {}}, "token_ids"),
        ({"token_ids": [1], "sampling_params": {}, "return_routed_experts": True}, "return_routed_experts"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_its_name(body: dict[str, Any], param: str) -> None:
    async with in_process(engine()) as client:
        reply = await client.post(ROUTE, json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param


def recorded(prompt: list[int], sampling: SamplingParams) -> list[TokenDelta]:
    file = b"file" if sampling.routed_experts else b""
    return [TokenDelta("", (70,)), TokenDelta("", (71,), "length", routed_experts=file)]


@pytest.mark.parametrize("stream", [True, False])
async def test_routed_experts_come_with_the_last_tokens_of_each_choice(stream: bool) -> None:
    body = {"token_ids": [5], "sampling_params": {"n": 2, "max_tokens": 2}, "stream": stream}
    async with in_process(FakeEngine(recorded), records_experts=True) as client:
        reply = await client.post(ROUTE, json=body | {"return_routed_experts": True})
        silent = await client.post(ROUTE, json=body)
        stop = body | {"sampling_params": {"stop": ["x"]}, "return_routed_experts": True}
        refused = await client.post(ROUTE, json=stop)
    replies = events(reply.text) if stream else [reply.json()]
    found = [
        (choice["index"], choice["routed_experts"])
        for each in replies
        for choice in each["choices"]
        if "routed_experts" in choice
    ]
    assert sorted(found) == [(0, "ZmlsZQ=="), (1, "ZmlsZQ==")] and "routed_experts" not in silent.text
    assert refused.status_code == 400 and "use stop_token_ids" in refused.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("route", "body"), [(CHAT, HELLO), (TEXT, PROMPT)])
async def test_other_routes_say_the_versions_when_asked(route: str, body: dict[str, Any], stream: bool) -> None:
    async with in_process(engine()) as client:
        reply = await client.post(route, json=body | {"stream": stream, "return_weight_versions": True})
        silent = await client.post(route, json=body | {"stream": stream})
    replies = events(reply.text) if stream else [reply.json()]
    found = [choice["weight_versions"] for each in replies for choice in each["choices"] if "weight_versions" in choice]
    assert found == [VERSIONS] and "weight_versions" not in silent.text
