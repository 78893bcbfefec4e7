"""The GSM8K client: prompts, results, scores, retries; against a scripted server."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from tests.bench.quality import gsm8k
from tests.bench.quality.gsm8k import Pass, Reply, chats_of, equality, prompts_of, result_of, score
from tests.bench.quality.word_problems import Problem, read_problems, word_problems


def test_prompt_is_the_shots_and_the_question() -> None:
    shots, problems = [Problem("A?", "1\n#### 1")], [Problem("B?", "#### 2"), Problem("C?", "#### 3")]
    assert [prompt["prompt"] for prompt in prompts_of(shots, problems)] == [
        f"Question: A?\nAnswer: 1\n#### 1\n\nQuestion: {letter}?\nAnswer:" for letter in "BC"
    ]
    assert chats_of(shots, problems)[1] == {
        "messages": [
            {"role": "user", "content": "A?"},
            {"role": "assistant", "content": "1\n#### 1"},
            {"role": "user", "content": "C?"},
        ]
    }


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("so 3 and 4.\n#### 12", 12),
        ("$1,234.50 in all", 1234.5),
        ("-7", -7),
        ("18.00.", 18),
        ("none", None),
        ("", None),
    ],
)
def test_result_is_the_last_number(text: str, result: float | None) -> None:
    assert result_of(text) == result


def test_score_counts_right_invalid_rounds_and_failures() -> None:
    replies = [Reply("#### 4", 10, 4, 6), Reply("4 or 5", 30, 6, 9), Reply("?", 10), Reply(fault="500: x")]
    figures = score(Pass(replies, 2.0), [Problem("q", "#### 4")] * 4)
    assert figures == {
        "num_questions": 4,
        "accuracy": 0.25,
        "invalid": 0.5,
        "acceptance_length": 2.5,
        "latency_s": 2.0,
        "output_tokens": 50,
        "output_tokens_per_s": 25.0,
        "num_failed": 1,
        "first_fault": "500: x",
    }


def test_equality_names_where_the_first_pair_parts() -> None:
    on, off = Pass([Reply("same"), Reply("abc one")], 1), Pass([Reply("same"), Reply("abc two")], 1)
    assert equality(on, off) == {
        "equal_share": 0.5,
        "num_unequal": 1,
        "first_unequal": {"question": 1, "after": "abc ", "on": "one", "off": "two"},
    }
    assert equality(on, on) == {"equal_share": 1.0, "num_unequal": 0}
    failed = Pass([Reply(fault="x")], 1)
    assert equality(failed, failed)["equal_share"] == 0.0, "two failures are no equal answers"


def test_made_problems_are_right_and_repeat() -> None:
    problems = word_problems(200, seed=5)
    assert problems == word_problems(200, seed=5) and len({p.question for p in problems}) > 150
    for problem in problems:
        for marked in problem.answer.split("<<")[1:]:
            left, result = marked.partition(">>")[0].split("=")
            assert eval(left) == int(result)  # noqa: S307
        assert problem.result == int(result) > 0 and result_of(problem.answer) == problem.result


def test_data_without_a_result_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    good = json.dumps({"question": "q", "answer": "#### 1,200"})
    path.write_text(f"{good}\n\n")
    assert read_problems(path)[0].result == 1200
    for bad in ('{"question": "q"}', '{"question": "q", "answer": "none"}', "[]", "{"):
        path.write_text(f"{good}\n{bad}\n")
        with pytest.raises(ValueError, match="data.jsonl:2: want an object with question and answer"):
            read_problems(path)


def _client(answers: list[httpx.Response | Exception], seen: list[str]) -> httpx.AsyncClient:
    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(f"{request.method} {request.url.path}")
        reply = answers.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    return httpx.AsyncClient(transport=httpx.MockTransport(answer))


async def test_flush_is_tried_three_times_then_fails_with_the_answer() -> None:
    seen: list[str] = []
    busy = [httpx.Response(409, text="1 requests run"), httpx.ConnectError("gone")]
    async with _client([*busy, httpx.Response(200)], seen) as client:
        await gsm8k.flush_cache(client, "http://server", pause_s=0)
    assert seen == ["POST /flush_cache"] * 3
    async with _client([*busy, httpx.Response(409, text="still 1 requests run")], seen) as client:
        with pytest.raises(RuntimeError, match="tried 3 times; the last answer: 409: still 1 requests run"):
            await gsm8k.flush_cache(client, "http://server", pause_s=0)


async def test_parallel_requests_are_bounded_and_failures_kept() -> None:
    active, most = 0, 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal active, most
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        active += 1
        most = max(most, active)
        await asyncio.sleep(0.01)
        active -= 1
        body = json.loads(request.content)
        assert body["speculative"] is False and body["temperature"] == 0
        if "messages" in body:
            assert request.url.path == "/v1/chat/completions"
            message = {"content": body["messages"][0]["content"]}
            return httpx.Response(200, json={"choices": [{"message": message}], "usage": {"completion_tokens": 2}})
        assert request.url.path == "/v1/completions" and "Question" in body["stop"]
        if body["prompt"] == "bad":
            return httpx.Response(400, text="too long")
        return httpx.Response(
            200,
            json={
                "choices": [{"text": body["prompt"]}],
                "usage": {"completion_tokens": 2},
                "metrics": {"speculative_decoding": {"num_spec_steps": 1, "num_accepted_draft_tokens": 1}},
            },
        )

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        prompts = [{"prompt": text, "stop": ["Question"]} for text in ("a", "bad", "c", "d")]
        prompts.append({"messages": [{"role": "user", "content": "e"}]})
        done = await gsm8k.ask_all(client, "http://server", prompts, 8, parallel=2, speculative=False)
    assert most == 2
    assert [reply.text for reply in done.replies] == ["a", "", "c", "d", "e"]
    assert done.replies[1].fault == "400: too long"
