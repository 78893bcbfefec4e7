"""CPU time of one streamed chunk in the API, without server and engine."""

import asyncio
import time
from typing import Any

import pytest

from aerie.cluster.http.admission import Admission
from aerie.cluster.http.requests.edge_request import chat_request
from aerie.cluster.http.routes.generation import ChatReply
from aerie.cluster.http.schema.request import ChatCompletionRequest
from aerie.cluster.http.serving import Edge, GenerationResponse
from aerie.cluster.http.tenants import Tenant
from aerie.cluster.transport.messages import TokenDelta
from aerie.workers.scheduling.request import Owner
from tests.support.edge_client import MODEL, edge_config
from tests.support.fake_engine import FakeEngine, chat_tokenizer, small_tokenizer

NUM_CHUNKS = 4000
LIMIT_US = 60.0


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"stop": ["\n\nUser:", "END"]},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
    ids=["plain", "stop", "usage"],
)
async def test_chunk_of_four_tokens_costs_little(extra: dict[str, Any], record_property: Any) -> None:
    """Measured 12, 20 and 19 us on a 2.1 GHz Xeon; best of three, of the process's own time, so that the limit holds on
    a busy machine too."""
    tokens = tuple(small_tokenizer().encode("hello world").ids)[:4]
    deltas = [TokenDelta("", tokens) for _ in range(NUM_CHUNKS)] + [TokenDelta("", (), "length")]
    config, tokenizer = edge_config(max_model_len=10**6, output_parser="text"), chat_tokenizer()
    edge = Edge(config, tokenizer, FakeEngine(lambda prompt, sampling: deltas), Admission(1))
    messages = [{"role": "user", "content": "hi"}]
    request = await chat_request(
        ChatCompletionRequest.model_validate({"model": MODEL, "messages": messages, "stream": True} | extra),
        config,
        tokenizer,
    )
    sent = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.sleep(600)

    costs = []
    for _ in range(3):
        sent.clear()
        start = time.process_time()
        await GenerationResponse(edge, request, ChatReply, "chatcmpl-0", Owner("cost"), Tenant())(
            {"state": {}}, receive, send
        )
        costs.append((time.process_time() - start) / NUM_CHUNKS * 1e6)
        assert len(sent) == NUM_CHUNKS + 3
    record_property("us_per_chunk", min(costs))
    assert min(costs) < LIMIT_US
