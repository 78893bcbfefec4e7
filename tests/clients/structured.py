"""Structured output and tools as clients ask for them: openai, instructor, langchain-openai, litellm.

    python -m tests.clients.structured URL        # those that are installed; see docs/clients.md

They need the server's `ingress.output_parser: hermes`. Each case must give a value of `Person`, whatever the model:
forms and calls are forced. Greedy, so that two runs say the same. A line per case, then how many were right; the exit
status is 1 if one was not.
"""

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal

import httpx
from pydantic import BaseModel, Field


class Person(BaseModel):
    """Somebody."""

    name: str = Field(pattern="^[A-Z][a-z]{1,10}$")
    age: int = Field(ge=0, le=120)
    kind: Literal["adult", "child"]


Case = tuple[str, Callable[[], Any]]
QUESTION = "Ann is 30 years old. Who is she?"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
KEY = "none"
LIMITS: Any = {"max_tokens": 300, "temperature": 0}


def openai_cases(base: str, model: str) -> Iterator[Case]:
    import openai

    client = openai.OpenAI(base_url=base, api_key=KEY)
    asked: Any = {"model": model, "messages": MESSAGES, **LIMITS}
    item: Any = {"model": model, "input": QUESTION, "text_format": Person, "max_output_tokens": 300, "temperature": 0}

    def stream() -> Any:
        with client.chat.completions.stream(**asked, response_format=Person) as events:
            return events.get_final_completion().choices[0].message.parsed

    def tool() -> Any:
        tools = [openai.pydantic_function_tool(Person)]
        reply = client.chat.completions.parse(**asked, tools=tools, tool_choice="required")
        return reply.choices[0].message.tool_calls[0].function.parsed_arguments

    def responses_stream() -> Any:
        with client.responses.stream(**item) as events:
            return events.get_final_response().output_parsed

    yield (
        "chat.completions.parse",
        lambda: client.chat.completions.parse(**asked, response_format=Person).choices[0].message.parsed,
    )
    yield "chat.completions.stream", stream
    yield "chat.completions.parse, pydantic_function_tool", tool
    yield "responses.parse", lambda: client.responses.parse(**item).output_parsed
    yield "responses.stream", responses_stream


def instructor_cases(base: str, model: str) -> Iterator[Case]:
    import instructor
    import openai

    asked: Any = {"model": model, "messages": MESSAGES, "response_model": Person, "max_retries": 0, **LIMITS}
    for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"):
        client = instructor.from_openai(openai.OpenAI(base_url=base, api_key=KEY), mode=instructor.Mode[mode])
        yield mode, lambda client=client: client.chat.completions.create(**asked)

    def partial() -> Any:
        return Person.model_validate(list(client.chat.completions.create_partial(**asked))[-1].model_dump())

    yield "create_partial, JSON_SCHEMA", partial


def langchain_cases(base: str, model: str) -> Iterator[Case]:
    from langchain_openai import ChatOpenAI

    options: Any = {"base_url": base, "api_key": KEY, "model": model, **LIMITS}
    chat, responses = ChatOpenAI(**options), ChatOpenAI(**options, use_responses_api=True)

    def streamed() -> Any:
        whole: Any = None
        for chunk in chat.bind_tools([Person], tool_choice="Person").stream(QUESTION):
            whole = chunk if whole is None else whole + chunk
        return Person.model_validate(whole.tool_calls[0]["args"])

    def bound() -> Any:
        message = chat.bind_tools([Person], tool_choice="required").invoke(QUESTION)
        return Person.model_validate(message.tool_calls[0]["args"])

    forms: Any = ({"method": "json_schema"}, {"method": "json_schema", "strict": True}, {"method": "function_calling"})
    for form in forms:
        said = ", ".join(f"{name}={value}" for name, value in form.items())
        structured = chat.with_structured_output(Person, **form)
        yield f"with_structured_output, {said}", lambda structured=structured: structured.invoke(QUESTION)
    yield "bind_tools, required", bound
    yield "bind_tools, named, streamed", streamed
    yield "Responses, with_structured_output", lambda: responses.with_structured_output(Person).invoke(QUESTION)


def litellm_cases(base: str, model: str) -> Iterator[Case]:
    import litellm

    tool = {"type": "function", "function": {"name": "person", "parameters": Person.model_json_schema()}}

    def ask(provider: str, **options: Any) -> Any:
        asked = {"messages": MESSAGES, **LIMITS, **options}
        return litellm.completion(model=f"{provider}/{model}", api_base=base, api_key=KEY, **asked)

    def formed(provider: str) -> Any:
        return Person.model_validate_json(ask(provider, response_format=Person).choices[0].message.content)

    def called() -> Any:
        whole = litellm.stream_chunk_builder(list(ask("openai", tools=[tool], tool_choice="required", stream=True)))
        return Person.model_validate_json(whole.choices[0].message.tool_calls[0].function.arguments)

    yield "response_format, openai/", lambda: formed("openai")
    yield "response_format, hosted_vllm/", lambda: formed("hosted_vllm")

    def second_turn() -> Any:
        turns = [*MESSAGES, ask("openai").choices[0].message.model_dump(), *MESSAGES]  # as litellm returned it
        reply = ask("openai", messages=turns, response_format=Person)
        return Person.model_validate_json(reply.choices[0].message.content)

    yield "tools, required, streamed", called
    yield "a second turn", second_turn


CLIENTS = {
    "openai": openai_cases,
    "instructor": instructor_cases,
    "langchain-openai": langchain_cases,
    "litellm": litellm_cases,
}


def main(url: str) -> int:
    base = f"{url.rstrip('/')}/v1"
    model = httpx.get(f"{base}/models").raise_for_status().json()["data"][0]["id"]
    num_right = num_cases = 0
    for client, cases in CLIENTS.items():
        try:
            print(f"{client} {importlib.metadata.version(client)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{client}: not installed")
            continue
        for name, case in cases(base, model):
            num_cases += 1
            try:
                found = case()
                said = "ok" if isinstance(found, Person) else f"WRONG: {found!r}"
            except Exception as error:
                said = f"FAILED: {type(error).__name__}: {error}"
            num_right += said == "ok"
            print(f"  {name}: {said}", flush=True)
    print(f"{num_right} of {num_cases} right")
    return 0 if num_right == num_cases else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
