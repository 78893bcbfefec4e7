"""Streamed tool calls as clients join them: each library's stream must equal its whole answer.

    python -m tests.clients.streamed_calls URL [--runs 10] [--parallel] [--only CLIENT]    # those that are installed
    node tests/clients/streamed_calls.mjs URL [RUNS] [parallel]                            # those in JavaScript

See docs/clients.md. The served model needs a tool call format, such as `ingress.output_parser: hermes`. The call is
forced, so that any model makes one. Each run has another question, and another seed where the client sends one.
--parallel: the model calls as often as it likes. A line per form with the number of broken runs; the exit status is 1
if there was one.
"""

import argparse
import asyncio
import importlib.metadata
import json
import os
import sys
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, Literal

from pydantic import BaseModel, Field

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else litellm fetches it
Answer = tuple[str, list[tuple[str, Any]]]  # text, and the name and arguments of each call
Ask = Callable[[int, bool], Answer]  # arguments: number of the run, whether to stream
KEY = "none"
MAX_TOKENS = 200


class weather(BaseModel):  # noqa: N801 - instructor and langchain name the tool after it
    """Look up the weather."""

    place: Literal["Bern", "Basel", "Chur"]
    days: int = Field(ge=1, le=14)
    note: str = Field(pattern='^[a-z "]{0,12}$')


SCHEMA = weather.model_json_schema()
FUNCTION = {"name": "weather", "description": "Look up the weather.", "parameters": SCHEMA}
TOOL: Any = {"type": "function", "function": FUNCTION}


def question(run: int) -> str:
    return f"Rain in {('Bern', 'Basel', 'Chur')[run % 3]} in the next {run % 14 + 1} days? {'Please. ' * (run % 5)}"


def messages(run: int) -> Any:
    return [{"role": "user", "content": question(run)}]


def chat_calls(calls: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls or []]


def openai_forms(base: str, model: str, parallel: bool) -> Iterator[tuple[str, Ask]]:
    import openai

    client = openai.OpenAI(base_url=base, api_key=KEY, max_retries=0)

    def chat(run: int, stream: bool) -> Answer:
        asked: Any = {"model": model, "messages": messages(run), "tools": [TOOL], "tool_choice": "required"}
        asked |= {"seed": run, "temperature": 1, "max_tokens": MAX_TOKENS, "parallel_tool_calls": parallel}
        if stream:
            with client.chat.completions.stream(**asked) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**asked).choices[0].message
        return message.content or "", chat_calls(message.tool_calls)

    def response(run: int, stream: bool) -> Answer:
        asked: Any = {"model": model, "input": question(run), "tools": [{"type": "function", **FUNCTION}]}
        asked |= {"tool_choice": "required", "parallel_tool_calls": parallel, "max_output_tokens": MAX_TOKENS}
        asked |= {"temperature": 0, "extra_body": {"seed": run}}
        if stream:
            with client.responses.stream(**asked) as events:
                reply = events.get_final_response()
        else:
            reply = client.responses.create(**asked)
        calls = [(item.name, json.loads(item.arguments)) for item in reply.output if item.type == "function_call"]
        return reply.output_text, calls

    yield "chat.completions.stream", chat
    yield "responses.stream", response


def anthropic_forms(base: str, model: str, parallel: bool) -> Iterator[tuple[str, Ask]]:
    import anthropic

    client = anthropic.Anthropic(base_url=base.removesuffix("/v1"), api_key=KEY, max_retries=0)

    def message(run: int, stream: bool) -> Answer:
        tools = [{"name": "weather", "input_schema": SCHEMA}]
        choice = {"type": "any", "disable_parallel_tool_use": not parallel}
        asked: Any = {"model": model, "messages": messages(run), "tools": tools, "tool_choice": choice}
        asked |= {"max_tokens": MAX_TOKENS, "extra_body": {"seed": run}}
        if stream:
            with client.messages.stream(**asked) as events:
                reply = events.get_final_message()
        else:
            reply = client.messages.create(**asked)
        calls = [(block.name, block.input) for block in reply.content if block.type == "tool_use"]
        return "".join(block.text for block in reply.content if block.type == "text"), calls

    yield "messages.stream", message


def instructor_forms(base: str, model: str, parallel: bool) -> Iterator[tuple[str, Ask]]:
    import instructor
    import openai

    client = instructor.from_openai(openai.OpenAI(base_url=base, api_key=KEY, max_retries=0))

    def partial(run: int, stream: bool) -> Answer:
        asked: Any = {"model": model, "messages": messages(run), "max_retries": 0, "parallel_tool_calls": False}
        asked |= {"seed": run, "temperature": 1, "max_tokens": MAX_TOKENS}
        found: Any
        if stream:
            found = list(client.chat.completions.create_partial(response_model=weather, **asked))[-1]
        else:  # with the name that create_partial gives the tool
            found = client.create(response_model=instructor.Partial[weather], **asked)
        return "", [("weather", weather.model_validate(found.model_dump()).model_dump())]

    yield "create_partial, TOOLS", partial


def langchain_form(chat: Any, parallel: dict[str, Any], seeded: bool) -> Ask:
    """A chat model of langchain."""

    def ask(run: int, stream: bool) -> Answer:
        model = chat.bind_tools([weather], tool_choice="any", **parallel)
        options = {"seed": run} if seeded else {}
        message: Any = None
        if stream:
            for chunk in model.stream(question(run), **options):
                message = chunk if message is None else message + chunk
        else:
            message = model.invoke(question(run), **options)
        assert not getattr(message, "invalid_tool_calls", None), message.invalid_tool_calls
        return str(message.text), [(call["name"], call["args"]) for call in message.tool_calls]

    return ask


def langchain_openai_forms(base: str, model: str, parallel: bool) -> Iterator[tuple[str, Ask]]:
    from langchain_openai import ChatOpenAI

    options: Any = {"base_url": base, "api_key": KEY, "model": model, "max_tokens": MAX_TOKENS, "max_retries": 0}
    several = {"parallel_tool_calls": parallel}
    yield "stream", langchain_form(ChatOpenAI(temperature=1, **options), several, True)
    responses = ChatOpenAI(temperature=0, use_responses_api=True, **options)
    yield "stream, Responses", langchain_form(responses, several, False)


def langchain_anthropic_forms(base: str, model: str, parallel: bool) -> Iterator[tuple[str, Ask]]:
    from langchain_anthropic import ChatAnthropic

    url = base.removesuffix("/v1")
    chat: Any = ChatAnthropic(base_url=url, api_key=KEY, model=model, max_tokens=MAX_TOKENS, temperature=0)  # type: ignore[call-arg]
    yield "stream", langchain_form(chat, {"parallel_tool_calls": parallel}, False)


def litellm_forms(base: str, model: str, parallel: bool) -> Iterator[tuple[str, Ask]]:
    import litellm

    def form(provider: str, url: str, **options: Any) -> Ask:
        def ask(run: int, stream: bool) -> Answer:
            asked = {"messages": messages(run), "tools": [TOOL], "tool_choice": "required", "max_tokens": MAX_TOKENS}
            asked |= {"parallel_tool_calls": parallel, "api_base": url, "api_key": KEY, **options}
            reply: Any = litellm.completion(model=f"{provider}/{model}", stream=stream, **asked)
            message = (litellm.stream_chunk_builder(list(reply)) if stream else reply).choices[0].message
            return message.content or "", chat_calls(message.tool_calls)

        return ask

    for provider in ("openai", "hosted_vllm"):
        yield f"stream_chunk_builder, {provider}/", form(provider, base, temperature=0)
    yield "stream_chunk_builder, anthropic/", form("anthropic", base.removesuffix("/v1"), temperature=0)


def agents_forms(base: str, model: str, parallel: bool) -> Iterator[tuple[str, Ask]]:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    tool = agents.FunctionTool("weather", "Look up the weather.", SCHEMA, _say_dry, strict_json_schema=False)

    def form(make: Any) -> Ask:
        async def ask(run: int, stream: bool) -> Answer:
            settings: Any = {"tool_choice": "required", "parallel_tool_calls": parallel, "max_tokens": MAX_TOKENS}
            async with openai.AsyncOpenAI(base_url=base, api_key=KEY, max_retries=0) as client:
                agent = agents.Agent(
                    name="a",
                    model=make(model, openai_client=client),
                    tools=[tool],
                    model_settings=agents.ModelSettings(temperature=0, **settings),
                    tool_use_behavior="stop_on_first_tool",
                )
                if stream:
                    result: Any = agents.Runner.run_streamed(agent, question(run))
                    async for _ in result.stream_events():
                        pass
                else:
                    result = await agents.Runner.run(agent, question(run))
            items = [item.raw_item for item in result.new_items if item.type == "tool_call_item"]
            said = [item for item in result.new_items if item.type == "message_output_item"]
            text = agents.ItemHelpers.text_message_outputs(said)
            return text, [(item.name, json.loads(item.arguments)) for item in items]

        return lambda run, stream: asyncio.run(ask(run, stream))

    yield "run_streamed, chats", form(agents.OpenAIChatCompletionsModel)
    yield "run_streamed, Responses", form(agents.OpenAIResponsesModel)


async def _say_dry(context: Any, arguments: str) -> str:
    return "dry"


def pydantic_ai_forms(base: str, model: str, parallel: bool) -> Iterator[tuple[str, Ask]]:
    from pydantic_ai import messages as parts
    from pydantic_ai.direct import model_request, model_request_stream
    from pydantic_ai.models import ModelRequestParameters
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.tools import ToolDefinition

    tool = ToolDefinition(name="weather", description="Look up the weather.", parameters_json_schema=SCHEMA)
    parameters = ModelRequestParameters(function_tools=[tool], allow_text_output=False)

    def form(make: Any, seeded: bool) -> Ask:
        async def ask(run: int, stream: bool) -> Answer:
            asked = [parts.ModelRequest(parts=[parts.UserPromptPart(content=question(run))])]
            settings: Any = {"max_tokens": MAX_TOKENS, "parallel_tool_calls": parallel, "temperature": 0}
            settings |= {"seed": run, "temperature": 1} if seeded else {}
            options: Any = {"model_settings": settings, "model_request_parameters": parameters}
            chosen = make(model, provider=OpenAIProvider(base_url=base, api_key=KEY))
            if stream:
                async with model_request_stream(chosen, asked, **options) as events:
                    async for _ in events:
                        pass
                    reply = events.get() if not hasattr(events, "response") else events.response
            else:
                reply = await model_request(chosen, asked, **options)
            calls = [p for p in reply.parts if isinstance(p, parts.ToolCallPart)]
            text = "".join(p.content for p in reply.parts if isinstance(p, parts.TextPart))
            return text, [(call.tool_name, call.args_as_dict()) for call in calls]

        return lambda run, stream: asyncio.run(ask(run, stream))

    yield "model_request_stream, chats", form(OpenAIChatModel, True)
    yield "model_request_stream, Responses", form(OpenAIResponsesModel, False)


CLIENTS = {
    "openai": openai_forms,
    "anthropic": anthropic_forms,
    "instructor": instructor_forms,
    "langchain-openai": langchain_openai_forms,
    "langchain-anthropic": langchain_anthropic_forms,
    "litellm": litellm_forms,
    "openai-agents": agents_forms,
    "pydantic-ai-slim": pydantic_ai_forms,
}


def fault(ask: Ask, run: int, several: bool) -> str | None:
    """Return the fault of a run; None if it has none."""
    try:
        whole, streamed = ask(run, False), ask(run, True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if not whole[1] or (len(whole[1]) > 1 and not several):
        return f"calls of the whole answer: {whole[1]}"
    return None if streamed == whole else f"streamed {streamed}, whole {whole}"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients.streamed_calls", description=__doc__.split("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--parallel", action="store_true", help="let the model make several calls")
    parser.add_argument("--only", nargs="+", choices=CLIENTS, default=list(CLIENTS), help="these clients")
    options = parser.parse_args()
    base = f"{options.url.rstrip('/')}/v1"
    with urllib.request.urlopen(f"{base}/models") as reply:
        model = json.load(reply)["data"][0]["id"]
    num_broken = num_forms = 0
    for client, forms in ((name, CLIENTS[name]) for name in options.only):
        try:
            version = importlib.metadata.version(client)
        except importlib.metadata.PackageNotFoundError:
            continue
        for name, ask in forms(base, model, options.parallel):
            faults = [found for run in range(options.runs) if (found := fault(ask, run, options.parallel))]
            print(f"{client} {version} | {name} | {len(faults)} of {options.runs} broken", flush=True)
            if faults:
                print(f"    {faults[0][:400]}", flush=True)
            num_broken, num_forms = num_broken + len(faults), num_forms + 1
    print(f"{num_broken} broken runs of {num_forms * options.runs}")
    return int(num_broken > 0 or not num_forms)


if __name__ == "__main__":
    sys.exit(main())
