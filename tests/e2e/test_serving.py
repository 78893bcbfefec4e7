"""The whole path with a tiny random model and its draft on two tensor-parallel ranks, from HTTP to ranks and back."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.e2e.checkpoint import make_checkpoints
from tests.e2e.serving import Server, actor_pids, engine_stats, serving, wait_idle

# Ray leaves sockets and subprocesses to the garbage collector when it is shut down in the process that started it.
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning")]


@pytest.fixture(scope="module")
def server(ray_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    target, draft = make_checkpoints(folder)
    args: dict[str, Any] = {
        "model": {"path": str(target), "device": "cpu"},
        "speculative": {"path": str(draft), "num_steps": 3, "num_draft_tokens": 4, "adaptive": False},
        "cache": {"num_pages": 400},
        "scheduler": {"max_running": 8},
        "parallel": {"tensor_parallel": 2},
        "engine": {"debug": True},
    }
    with serving(ray_port, args, folder) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def _complete(client: openai.OpenAI, prompt: str, **parameters: Any) -> Any:
    defaults = {"max_tokens": 12, "temperature": 0}
    return client.completions.create(model="target", prompt=prompt, **(defaults | parameters))


def test_models_and_health(server: Server, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["target"]
    status, body = server.health()
    assert status == 200 and body["engines"][0]["status"] == "ready"


def test_what_tries_grammars_is_begun_before_the_first_of_them(server: Server) -> None:
    """It takes seconds to start, which the first request with a grammar would wait for."""
    (ingress,) = actor_pids("ServeReplica:aerie:Ingress")
    deadline_s = time.monotonic() + 30.0
    while (
        not (found := _children(ingress, "aerie.workers.structured_output.mask_process.template_process"))
        and time.monotonic() < deadline_s
    ):
        time.sleep(0.1)
    assert len(found) == 1


def _children(pid: int, program: str) -> list[int]:
    """Processes that `pid` has started and whose command line contains `program`."""
    children = psutil.Process(pid).children()
    return [child.pid for child in children if program in " ".join(child.cmdline())]


def test_stream_carries_the_same_text_as_the_whole_answer(client: openai.OpenAI) -> None:
    whole = _complete(client, "once upon").choices[0].text
    parts = [chunk.choices[0].text for chunk in _complete(client, "once upon", stream=True) if chunk.choices]
    assert "".join(parts) == whole and whole


def test_chat_streams_role_text_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="target",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens <= 12
    assert chunks[-2].choices[0].finish_reason in ("stop", "length")


def test_speculation_does_not_change_greedy_text(client: openai.OpenAI) -> None:
    with_draft = _complete(client, "abc", max_tokens=24)
    without = _complete(client, "abc", max_tokens=24, extra_body={"speculative": False})
    assert with_draft.choices[0].text == without.choices[0].text
    assert with_draft.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


@pytest.mark.slow  # as `tests.deploy.offline.test_llm` and the edge stop
def test_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    whole = _complete(client, "stop here", max_tokens=16).choices[0].text
    stop = whole[5:7]
    answer = _complete(client, "stop here", max_tokens=16, stop=[stop])
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    wait_idle()


@pytest.mark.slow  # `tests.deploy.offline.test_llm`: several answers with a seed
def test_n_choices_differ_when_sampled(client: openai.OpenAI) -> None:
    answer = _complete(client, "many", n=4, temperature=1, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) > 1


@pytest.mark.slow  # as above
def test_seed_repeats_a_sampled_answer(client: openai.OpenAI) -> None:
    texts = {_complete(client, "again", temperature=1, seed=11).choices[0].text for _ in range(2)}
    assert len(texts) == 1


def test_logprobs_stand_beside_each_token(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="target",
        messages=[{"role": "user", "content": "p"}],
        max_tokens=9,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    content = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None and len(content) == answer.usage.completion_tokens  # type: ignore[union-attr]
    for token in content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob, abs=1e-4)  # greedy: the likeliest


def test_thirty_two_at_once_each_get_what_they_get_alone(server: Server, client: openai.OpenAI) -> None:
    prompts = [f"{i} bottles of beer on the wall"[: 4 + i] for i in range(32)]
    alone = [_complete(client, prompt, max_tokens=3 + i % 5).choices[0].text for i, prompt in enumerate(prompts[:6])]

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as many:
            answers = await asyncio.gather(
                *(
                    many.completions.create(model="target", prompt=prompt, max_tokens=3 + i % 5, temperature=0)
                    for i, prompt in enumerate(prompts)
                )
            )
        return [answer.choices[0].text for answer in answers]

    together = asyncio.run(ask_all())
    # Rows of other requests in a product may flip a tie of a random model: most must be equal, and all must be there.
    assert sum(a == b for a, b in zip(alone, together, strict=False)) >= 5
    assert all(together)
    wait_idle()


def test_client_that_leaves_frees_pages_and_slot(server: Server) -> None:
    body = {"model": "target", "prompt": "go on", "max_tokens": 400, "stream": True, "ignore_eos": True}
    for _ in range(3):
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as stream:
            lines = (line for line in stream.iter_lines() if line)
            next(lines), next(lines)
            assert engine_stats()[0].num_running == 1
    stats = wait_idle()
    assert stats.scheduler.finished.get("abort", 0) >= 3


def test_client_that_leaves_without_streaming_frees_too(server: Server) -> None:
    body = {"model": "target", "prompt": "go on", "max_tokens": 480, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=httpx.Timeout(60, read=0.3))
    wait_idle()


def test_flushed_cache_finds_nothing_and_a_running_request_goes_on(server: Server, client: openai.OpenAI) -> None:
    def cached() -> int:
        answer = _complete(client, "a prompt of some pages, " * 4, max_tokens=2)
        return int(answer.usage.prompt_tokens_details.cached_tokens)

    cached()
    assert cached() > 0
    body = {"model": "target", "prompt": "go on", "max_tokens": 100, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
        lines = (line for line in stream.iter_lines() if line)
        next(lines), next(lines)
        refused = httpx.post(f"{server.url}/flush_cache", timeout=30)
        assert refused.status_code == 409, refused.text
        assert "1 requests run and 0 wait" in refused.json()["error"]["message"]
        assert cached() > 0, "a refused flush changed something"
        assert '"finish_reason":"length"' in list(lines)[-2]
    flushed = httpx.post(f"{server.url}/reset_prefix_cache?timeout=10", timeout=30)
    assert flushed.status_code == 200 and flushed.json()["engines"][0]["num_pages"] > 0
    assert cached() == 0


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"model": "other"}, 404),
        ({"max_tokens": -1}, 400),
        ({"max_tokens": 10_000}, 400),
        ({"temperature": 9}, 400),
        ({"n": 1000}, 400),
        ({"stop": ["x"] * 100}, 400),
        ({"prompt": "x" * 5000}, 400),
        ({"prompt": 5}, 400),
        ({"prompt": [999_999]}, 400),
        ({"logprobs": 1000}, 400),
        ({"maxTokens": 5}, 400),
        ({"top_p": 2}, 400),
        ({"logit_bias": {"x": 1}}, 400),
    ],
)
def test_bad_input_is_answered_with_a_client_error(server: Server, change: dict[str, Any], status: int) -> None:
    body = {"model": "target", "prompt": "x", "max_tokens": 4} | change
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"prompt": "\xff"}', b"NaN", b"[" * 100_000])
def test_unreadable_body_is_a_client_error(server: Server, raw: bytes) -> None:
    answer = httpx.post(
        f"{server.url}/v1/completions", content=raw, headers={"content-type": "application/json"}, timeout=30
    )
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_metrics_count_what_was_served(server: Server, client: openai.OpenAI) -> None:
    before = engine_stats()[0].scheduler.generation_tokens
    tokens = _complete(client, "count", max_tokens=10, extra_body={"ignore_eos": True}).usage.completion_tokens
    assert engine_stats()[0].scheduler.generation_tokens - before == tokens == 10
    time.sleep(0.6)  # statistics are cached for half a second
    text = httpx.get(f"{server.url}/metrics", timeout=10).text
    assert "vllm:spec_decode_num_drafts_total" in text and "vllm:num_requests_running" in text


def test_a_prompt_is_scored_alike_with_speculation_and_without(client: openai.OpenAI) -> None:
    """Chunk by chunk from two ranks, although the prefix cache has the prompt by then."""
    prompt, found = "Ines has 3 kites and buys 4 more. " * 12, []
    for speculative in (True, False):
        body = {"speculative": speculative}
        answer = _complete(client, prompt, max_tokens=0, echo=True, logprobs=2, extra_body=body)
        assert answer.choices[0].text == prompt and answer.usage.completion_tokens == 0
        found.append(answer.choices[0].logprobs)
    assert found[0].tokens == found[1].tokens and found[0].token_logprobs[0] is None
    assert found[0].token_logprobs[1:] == pytest.approx(found[1].token_logprobs[1:], abs=1e-3)
    assert len(found[0].top_logprobs) == len(found[0].tokens) == answer.usage.prompt_tokens


def test_messages_in_anthropics_form(server: Server) -> None:
    body = {
        "model": server.model,
        "max_tokens": 8,
        "messages": [{"role": "user", "content": "Hello!"}],
        "temperature": 0,
    }
    whole = httpx.post(f"{server.url}/v1/messages", json=body, timeout=60).json()
    stream = httpx.post(f"{server.url}/v1/messages", json=body | {"stream": True}, timeout=60).text
    parts = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: ")]
    texts = [part["delta"]["text"] for part in parts if part["type"] == "content_block_delta"]
    assert "".join(texts) == whole["content"][0]["text"] and parts[-1]["type"] == "message_stop"


FORM = {"type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 22]}}, "required": ["ok", "n"]}


@pytest.mark.parametrize("temperature", [0, 1])
def test_answers_follow_a_schema(client: openai.OpenAI, temperature: float) -> None:
    """With drafts and without, from HTTP to two ranks; the grammar is tried in a process of its own before."""
    texts = []
    for speculative in (True, False):
        answer = client.chat.completions.create(
            model="target",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=60,
            temperature=temperature,
            seed=3,
            n=2,
            extra_body={
                "structured_outputs": {"json": FORM, "disable_any_whitespace": True},
                "speculative": speculative,
            },
        )
        assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
        texts.append([choice.message.content for choice in answer.choices])
    assert texts[0] == texts[1]
    for text in texts[0]:
        found = json.loads(text)
        assert found.keys() == {"ok", "n"} and found["ok"] in (True, False) and found["n"] in (1, 22)
    wait_idle()


def test_a_grammar_that_does_not_compile_is_refused(client: openai.OpenAI) -> None:
    for asked, reason in (
        ({"regex": "a(b"}, "parenthesis is not closed"),
        ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ):
        with pytest.raises(openai.BadRequestError, match=reason):
            _complete(client, "x", extra_body={"structured_outputs": asked})
