"""Tool calls and forms of answer end to end: OpenAI's client, the HTTP edge, and the embedded pair with speculation.
The pair was not trained for tools, so the calls are forced; what comes is valid because of the constraint."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec
import openai
import pytest
import torch
from tokenizers import Tokenizer

from aerie.cluster.http.text.harmony_prompt import HarmonyPrompt
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.cluster.transport.messages import TokenDelta
from aerie.deploy.cli import main
from aerie.deploy.offline.llm import LLM
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request
from tests.support import MODELS
from tests.support.edge_client import MODEL, served
from tests.support.fake_engine import FakeEngine
from tests.support.harmony import SOURCE

TARGET = MODELS / "target"
PARAMETERS = {
    "type": "object",
    "properties": {"unit": {"enum": ["celsius", "kelvin"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
TIME: Any = {"type": "function", "function": {"name": "time"}}
MESSAGES: Any = [{"role": "user", "content": "How is the weather?"}]


class OfflineEngine(FakeEngine):
    """An engine of this process in place of the script."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(lambda prompt, sampling: ())
        self._llm = llm

    async def generate(
        self, prompt: list[int], sampling: SamplingParams, request_id: str, *others: object, **options: object
    ) -> AsyncGenerator[TokenDelta, None]:
        ends = tuple(self._llm._engine.tokenizer.eos_token_ids)
        sampling = msgspec.structs.replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *ends))
        async with contextlib.aclosing(
            self._llm._engine.thread.stream([Request(request_id, prompt, sampling)])
        ) as steps:
            async for deltas in steps:
                for delta in deltas:
                    yield delta


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    torch.set_num_threads(1)
    with LLM("eagle", tensor_parallel_size=1) as llm:
        yield llm


def _check(name: str, arguments: str) -> None:
    parsed = json.loads(arguments)
    if name == "time":
        assert parsed == {}
    else:
        assert name == "weather" and parsed["unit"] in ("celsius", "kelvin") and 1 <= parsed["days"] <= 9
        assert set(parsed) == {"unit", "days"}


async def test_forced_calls_are_whole_and_valid(llm: LLM) -> None:
    """Greedy and sampled."""
    config: dict[str, Any] = {"output_parser": "hermes", "max_model_len": 512}
    greedy: Any = {"model": MODEL, "temperature": 0.0}
    sampled: Any = {"model": MODEL, "temperature": 1.0, "seed": 5}
    async with (
        served(OfflineEngine(llm), ChatTokenizer.from_folder(TARGET), **config) as url,  # type: ignore[arg-type]
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        chats = client.chat.completions
        named: Any = {"type": "function", "function": {"name": "weather"}}
        whole = await chats.create(messages=MESSAGES, tools=[WEATHER, TIME], tool_choice=named, **greedy)
        async with chats.stream(
            messages=MESSAGES, tools=[WEATHER, TIME], tool_choice="required", parallel_tool_calls=False, **sampled
        ) as stream:
            streamed = await stream.get_final_completion()
        own: Any = {"model": MODEL, "temperature": 1.0, "extra_body": {"seed": 5}, "parallel_tool_calls": False}
        tool: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS}
        response = await client.responses.create(input="Hello", tools=[tool], tool_choice="required", **own)
        schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": PARAMETERS}}
        form = await chats.create(messages=MESSAGES, response_format=schema, **greedy)
    for choice in (whole.choices[0], streamed.choices[0]):
        (call,) = choice.message.tool_calls or []
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        _check(call.function.name, call.function.arguments)  # type: ignore[union-attr]
    assert response.output
    for item in response.output:
        assert item.type == "function_call"
        _check(item.name, item.arguments)
    _check("weather", form.choices[0].message.content or "")


@pytest.mark.slow  # harmony's form: `tests.cluster.http.parsers.test_harmony`; forced calls: above
@pytest.mark.parametrize("stream", [True, False])
async def test_a_loop_of_tools_in_harmonys_form(llm: LLM, stream: bool) -> None:
    """As agents do over /v1/responses: a forced call, its result, and an answer of a form. The pair's tokenizer has no
    harmony tokens, so that the grammar writes the marks by their characters."""
    chat = ChatTokenizer(Tokenizer.from_file(str(TARGET / "tokenizer.json")), HarmonyPrompt(SOURCE, {}), (1,))
    chat.eos_token_ids = llm._engine.tokenizer.eos_token_ids
    config: dict[str, Any] = {"output_parser": "auto", "max_model_len": 1024}
    tool: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
    form: Any = {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": PARAMETERS}}
    conversation: list[Any] = [{"role": "user", "content": "How is the weather?"}]
    async with (
        served(OfflineEngine(llm), chat, **config) as url,  # type: ignore[arg-type]
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        for extra in ({"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}, {"text": form}):
            body: Any = {"model": MODEL, "input": conversation, "temperature": 0.0, "max_output_tokens": 160} | extra
            if stream:
                async with client.responses.stream(**body) as events:
                    response: Any = await events.get_final_response()
            else:
                response = await client.responses.create(**body)
            conversation += [item.model_dump(exclude_none=True) for item in response.output]
            for item in response.output:
                if item.type == "function_call":
                    _check(item.name, item.arguments)
                    conversation.append({"type": "function_call_output", "call_id": item.call_id, "output": "sun"})
    kinds = [item.get("type", "message") for item in conversation if item.get("type") != "reasoning"]
    assert kinds == ["message", "function_call", "function_call_output", "message"]
    _check("weather", response.output_text)


@pytest.mark.slow  # the command: `tests.deploy.test_check_cache`
async def test_the_cache_of_the_embedded_pair_changes_no_answer(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--words", "40", "--max-tokens", "6", "--conversations", "1", "--concurrency", "1"]
    async with served(OfflineEngine(llm), llm._engine.tokenizer, max_model_len=1024) as url:  # type: ignore[arg-type]
        assert await asyncio.to_thread(main, ["check-cache", url, *options]) == 0
    assert "0 of 11 answers differ" in capsys.readouterr().out
