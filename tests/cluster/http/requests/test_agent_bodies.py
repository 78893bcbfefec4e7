"""Request bodies of coding agents: answered, with the fields named that have no effect here.

Each is written after what the agent sends, as recorded from its program or read in its published source, with short
texts. `tests.clients.agents` runs the programs themselves.
"""

from typing import Any

import pytest

from tests.cluster.http.parsers.test_tools import TEMPLATE, tool_tokenizer
from tests.support.edge_client import CHAT, MODEL, RESPONSES, TEXT, in_process
from tests.support.fake_engine import FakeEngine, says, small_tokenizer

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
NO_SWITCH = TEMPLATE.replace("{% if enable_thinking %}<think>{% endif %}", "")
STRING = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
FUNCTION = {"name": "read", "description": "a file", "parameters": STRING, "strict": False}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
SHELL = {"type": "function", **FUNCTION, "name": "exec_command"}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


def chat(*turns: Any, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": list(turns), "stream": True, "stream_options": {"include_usage": True}} | more


def called(name: str = "read", arguments: str = '{"path": "a"}', **more: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}} | more
    return {"role": "assistant", "content": None, "tool_calls": [call]}


SYSTEM = {"role": "system", "content": "You are an agent."}
USER = {"role": "user", "content": "read a"}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "text of a"}


def item(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "id": f"msg_{role}", "role": role, "content": [{"type": kind, "text": text}]}


CODEX: dict[str, Any] = {
    "model": MODEL,
    "stream": True,
    "input": [
        item("developer", "You are an agent."),
        item("developer", "<permissions instructions>"),
        item("user", "<environment_context>"),
        item("user", "read a"),
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": None},
        {"type": "function_call", "id": "fc_1", "status": "completed", "name": "exec_command", "call_id": "c1"}
        | {"arguments": '{"path": "a"}'},
        {"type": "function_call_output", "id": "fco_1", "call_id": "c1", "output": "text of a"},
    ],
    "tools": [
        SHELL,
        {"type": "namespace", "name": "agents", "description": "of agents", "tools": [SHELL | {"name": "spawn_agent"}]},
        {"type": "tool_search", "execution": "client", "description": "of tools", "parameters": STRING},
        {"type": "custom", "name": "apply_patch", "description": "a patch", "format": {"type": "grammar"}},
        {"type": "local_shell"},
        {"type": "web_search", "external_web_access": True},
        {"type": "image_generation", "output_format": "png"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "high", "summary": "auto"},
    "text": {"verbosity": "low"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a2",
    "service_tier": "priority",
    "client_metadata": {"session_id": "01a2"},
}
CODEX_IGNORED = (
    "client_metadata,tools[2].type=tool_search,tools[3].type=custom,tools[4].type=local_shell,"
    "tools[5].type=web_search,tools[6].type=image_generation,reasoning.effort"
)
CLAUDE_CODE: dict[str, Any] = {
    "model": MODEL,
    "system": [
        {"type": "text", "text": "x-billing: cli"},
        {"type": "text", "text": "You are an agent."} | EPHEMERAL,
    ],
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "<system-reminder>"}, {"type": "text", "text": "read a"}],
        },
        {"role": "system", "content": "Available agents: none"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "so", "signature": ""},
                {"type": "tool_use", "id": "t1", "name": "Read", "input": {"path": "a"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "text of a"} | EPHEMERAL],
        },
    ],
    "tools": [
        {"name": "Read", "description": "a file", "input_schema": {"$schema": "x"} | STRING, "defer_loading": True},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": "{}"},
    "max_tokens": 320,
    "thinking": {"type": "adaptive", "display": "omitted"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "betas": ["context-management-2025-06-27"],
    "stream": True,
}
CLAUDE_IGNORED = (
    "context_management,betas,tools[0].defer_loading,tools[1].type=web_search_20250305,output_config.effort,thinking"
)
CLAUDE_COUNTS = {name: CLAUDE_CODE[name] for name in ("model", "system", "messages", "tools", "thinking")}
OPENCODE = chat(
    SYSTEM, USER, called(), RESULT, tools=[CHAT_TOOL], tool_choice="auto", max_tokens=320, reasoning_effort="medium"
)
# opencode's provider for OpenAI itself: the AI SDK's Responses.
OPENCODE_RESPONSES = {
    "model": MODEL,
    "input": [{"role": "developer", "content": "You are an agent."}]
    + [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    + [{"role": "assistant", "content": [{"type": "output_text", "text": "so"}], "id": "msg_1"}]
    + [{"role": "user", "content": [{"type": "input_text", "text": "and?"}]}],
    "max_output_tokens": 320,
    "text": {"verbosity": "medium"},
    "store": False,
    "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
    "prompt_cache_key": "ses_1",
    "reasoning": {"effort": "medium", "summary": "auto"},
    "truncation": "auto",
    "tools": [SHELL, {"type": "file_search", "vector_store_ids": ["v"]}, {"type": "mcp", "server_label": "x"}],
    "stream": True,
}
AIDER = {
    "model": MODEL,
    "messages": [SYSTEM, USER, {"role": "assistant", "content": "Ok."}, USER],
    "temperature": 0,
    "stream": True,
    "extra_headers": {},
    "reasoning_effort": "high",
    "thinking": {"type": "enabled", "budget_tokens": 8192},
}
CONTINUE = chat(
    SYSTEM,
    {"role": "user", "content": [{"type": "text", "text": "read a"}]},
    called() | {"content": " "},
    RESULT,
    tools=[CHAT_TOOL],
    parallel_tool_calls=False,
    max_tokens=320,
    prediction={"type": "content", "content": "text of a"},
)
CONTINUE_COMPLETION = {
    "model": MODEL,
    "prompt": "<|fim_prefix|>def f(<|fim_suffix|>):<|fim_middle|>",
    "suffix": "",
    "max_tokens": 96,
    "temperature": 0.01,
    "stop": ["<|fim_prefix|>", "\n\n"],
    "stream": True,
}
CLINE = chat(
    SYSTEM,
    {"role": "user", "content": [{"type": "text", "text": "<task>"} | EPHEMERAL, {"type": "text", "text": "more"}]},
    called() | {"reasoning_content": "so", "reasoning_details": [{"type": "reasoning.text", "text": "so"}]},
    RESULT,
    tools=[CHAT_TOOL],
    temperature=0,
    reasoning_effort="low",
    provider={"sort": "throughput"},
    include_reasoning=True,
)
OPENHANDS = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "You are an agent."} | EPHEMERAL]},
        {"role": "user", "content": [{"type": "text", "text": "read a"}]},
        called() | {"content": [{"type": "text", "text": "I read it."}]},
        {"role": "tool", "content": [{"type": "text", "text": "a"} | EPHEMERAL], "tool_call_id": "c1", "name": "read"},
    ],
    "tools": [CHAT_TOOL],
    "temperature": 0.0,
    "top_p": 1.0,
    "max_completion_tokens": 320,
    "seed": 5,
    "metadata": {"session_id": "s", "tags": ["a"]},
    "store": True,
    "safety_identifier": "user",
}
GOOSE = chat(SYSTEM, USER, called(), RESULT, tools=[CHAT_TOOL], reasoning_effort="medium", max_completion_tokens=320)
# Clients of Gemini over its endpoint in OpenAI's form: signatures of thoughts inside calls.
GEMINI = chat(
    SYSTEM,
    USER,
    called(extra_content={"google": {"thought_signature": "s"}}),
    RESULT,
    tools=[CHAT_TOOL, {"type": "google_search"}],
    extra_body={"google": {"thinking_config": {"include_thoughts": True}}},
    web_search_options={},
    reasoning_effort="low",
    n=1,
)
QWEN_CODE = chat(
    {"role": "system", "content": [{"type": "text", "text": "You are an agent."} | EPHEMERAL]},
    {"role": "user", "content": [{"type": "text", "text": "read a"}]},
    called(),
    RESULT | {"content": [{"type": "text", "text": "text of a"}]},
    tools=[CHAT_TOOL | EPHEMERAL],
    max_tokens=320,
    metadata={"sessionId": "s", "promptId": "p"},
    vl_high_resolution_images=True,
)

AGENTS: list[tuple[str, str, dict[str, Any], str]] = [
    ("codex", RESPONSES, CODEX, CODEX_IGNORED),
    ("claude-code", f"{MESSAGES}?beta=true", CLAUDE_CODE, CLAUDE_IGNORED),
    ("claude-code-count", COUNT, CLAUDE_COUNTS, "tools[0].defer_loading,tools[1].type=web_search_20250305,thinking"),
    ("opencode", CHAT, OPENCODE, "reasoning_effort"),
    (
        "opencode-responses",
        RESPONSES,
        OPENCODE_RESPONSES,
        "truncation,include=web_search_call.action.sources,tools[1].type=file_search,tools[2].type=mcp,reasoning.effort",
    ),
    ("aider", CHAT, AIDER, "extra_headers,thinking,reasoning_effort"),
    ("continue", CHAT, CONTINUE, "prediction"),
    ("continue-completion", TEXT, CONTINUE_COMPLETION, ""),
    (
        "cline",
        CHAT,
        CLINE,
        "provider,messages[1].content[0].cache_control,messages[2].reasoning_details,reasoning_effort",
    ),
    (
        "openhands",
        CHAT,
        OPENHANDS,
        "store,messages[0].content[0].cache_control,messages[3].content[0].cache_control",
    ),
    ("goose", CHAT, GOOSE, "reasoning_effort"),
    (
        "gemini-clients",
        CHAT,
        GEMINI,
        "extra_body,web_search_options,messages[2].tool_calls[0].extra_content,tools[1].type=google_search,"
        "reasoning_effort",
    ),
    (
        "qwen-code",
        CHAT,
        QWEN_CODE,
        "vl_high_resolution_images,messages[0].content[0].cache_control,tools[0].cache_control",
    ),
]


async def _post(route: str, body: dict[str, Any], **config: Any) -> tuple[Any, list[str]]:
    """The reply, and the prompts that reached the engine."""
    engine = FakeEngine(says("done"))
    async with in_process(
        engine, tool_tokenizer(NO_SWITCH), max_model_len=8192, output_parser="hermes", **config
    ) as http:
        reply = await http.post(route, json=body)
    return reply, [small_tokenizer().decode(call.prompt) for call in engine.calls]


@pytest.mark.parametrize(("route", "body", "ignored"), [row[1:] for row in AGENTS], ids=[row[0] for row in AGENTS])
async def test_an_agents_body_is_answered_and_what_has_no_effect_is_named(
    route: str, body: dict[str, Any], ignored: str
) -> None:
    reply, prompts = await _post(route, body)
    assert reply.status_code == 200, reply.text
    assert reply.headers.get("x-aerie-ignored", "") == ignored
    assert all("web_search" not in prompt and "apply_patch" not in prompt for prompt in prompts)
    reply, prompts = await _post(route, body, strict=True)
    if ignored:
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (400, "unknown_parameter") and not prompts
        assert ignored.startswith(error["param"]) and error["message"].endswith("(ingress.strict)")
    else:
        assert reply.status_code == 200


# One field each, on every route that has it: route, body, what the header names.
HI = {"role": "user", "content": "hi"}
SIBLINGS: list[tuple[str, dict[str, Any], str]] = [
    *((CHAT, {name: value}, name) for name, value in {"store": True, "verbosity": "low", "priority": -3}.items()),
    (TEXT, {"service_tier": "fast", "prediction": {}}, "service_tier,prediction"),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type=custom"),
    (CHAT, {"tools": [{"type": "web_search"}], "tool_choice": "auto"}, "tools[0].type=web_search"),
    (RESPONSES, {"context_management": [{"type": "compaction"}]}, "context_management"),
    (RESPONSES, {"reasoning": {"effort": "none"}}, "reasoning.effort"),
    (MESSAGES, {"mcp_servers": [{"name": "x"}], "container": "c"}, "mcp_servers,container"),
    (COUNT, {"output_config": {"effort": "low"}}, "output_config.effort"),
    (f"{CHAT}/batch", {"reasoning_effort": "low"}, "reasoning_effort"),
    ("/tokenize", {"tools": [{"type": "web_search"}]}, "tools[0].type=web_search"),
]


@pytest.mark.parametrize(("route", "extra", "ignored"), SIBLINGS)
async def test_a_field_without_effect_leaves_the_prompt_as_it_is(
    route: str, extra: dict[str, Any], ignored: str
) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": [[HI]] if "batch" in route else [HI]}
    if route in (RESPONSES, TEXT):
        body = {"model": MODEL, "input" if route == RESPONSES else "prompt": "hi"}
    if route == MESSAGES:
        body["max_tokens"] = 9
    plain, without = await _post(route, body)
    reply, prompts = await _post(route, body | extra)
    assert (plain.status_code, reply.status_code) == (200, 200), reply.text
    assert prompts == without
    assert (plain.headers.get("x-aerie-ignored"), reply.headers["x-aerie-ignored"]) == (None, ignored)
    strict, _ = await _post(route, body | extra, strict=True)
    assert (strict.status_code, strict.json()["error"]["param"]) == (400, ignored.partition(",")[0])


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (CHAT, {"messages": [HI], "functions": [FUNCTION]}, "functions"),
        (CHAT, {"messages": [HI], "tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].image_url",
        ),
        (CHAT, {"messages": [HI], "audio": {"voice": "x"}}, "audio"),
        (
            RESPONSES,
            {"input": "hi", "tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "tool_choice",
        ),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].image_url",
        ),
        (RESPONSES, {"input": "hi", "background": True}, "background"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
        (MESSAGES, {"messages": [HI], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
    ],
)
async def test_a_field_that_changes_the_answer_stays_refused_by_name(
    route: str, body: dict[str, Any], param: str
) -> None:
    reply, prompts = await _post(route, {"model": MODEL} | ({"max_tokens": 9} if route == MESSAGES else {}) | body)
    assert reply.status_code == 400 and not prompts
    assert reply.json()["error"]["param"].startswith(param)
