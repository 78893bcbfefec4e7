"""Coding agents as `tests.clients.agents` runs them: package, arguments, configuration, calls of their tools."""

import json
from dataclasses import dataclass, field
from typing import Any

MODEL, TASK, DONE, TEXT = "target", "Write a.txt, read it, and print it in capitals.", "The task is done.", "hello\n"
CAPITALS = "tr a-z A-Z < a.txt"
NO_TELEMETRY = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DO_NOT_TRACK": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "CONTINUE_TELEMETRY_ENABLED": "0",
    "CONTINUE_METRICS_ENABLED": "0",
    "CLINE_TELEMETRY_DISABLED": "1",
}


@dataclass(frozen=True)
class Agent:
    """A program. {url} is the server's address, {home} the program's home, {path} the file of the task.

    package: on npm, or on PyPI if it begins with `pip:`.
    calls: name and arguments of each tool call; or texts that answer request after request, without tools.
    files: configuration below the home, with SERVER for its address.
    before: arguments of a first run that configures it.
    """

    package: str
    binary: str
    arguments: tuple[str, ...]
    calls: tuple[tuple[str, dict[str, Any]] | str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()


_CODEX = """model = "target"
model_provider = "aerie"
[model_providers.aerie]
name = "Aerie"
base_url = "SERVER/v1"
wire_api = "responses"
[analytics]
enabled = false
"""
_OPENCODE = {
    "autoupdate": False,
    "share": "disabled",
    "model": f"aerie/{MODEL}",
    "small_model": f"aerie/{MODEL}",
    "provider": {
        "aerie": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "Aerie",
            "options": {"baseURL": "SERVER/v1", "apiKey": "x"},
            "models": {MODEL: {"name": MODEL, "tool_call": True, "reasoning": True}},
        }
    },
}
_CONTINUE = """name: local
version: 1.0.0
schema: v1
models:
  - {name: target, provider: openai, model: target, apiBase: "SERVER/v1", apiKey: x, capabilities: [tool_use]}
"""
_WHOLE = "a.txt\n```\n{}```\n"
_AIDER = "--no-analytics --no-check-update --no-show-release-notes --no-show-model-warnings --yes-always --no-git"
AGENTS = {
    "codex": Agent(
        "@openai/codex",
        "codex",
        ("exec", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", TASK),
        tuple(("exec_command", {"cmd": text}) for text in ("echo hello > a.txt", "cat a.txt", CAPITALS)),
        files={".codex/config.toml": _CODEX},
    ),
    "claude-code": Agent(
        "@anthropic-ai/claude-code",
        "claude",
        ("-p", TASK, "--dangerously-skip-permissions"),
        (
            ("Write", {"file_path": "{path}", "content": TEXT}),
            ("Read", {"file_path": "{path}"}),
            ("Bash", {"command": CAPITALS, "description": "capitals"}),
        ),
        environment={
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_API_KEY": "x",
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
            "IS_SANDBOX": "1",  # else it refuses to run as root
        },
    ),
    "opencode": Agent(
        "opencode-ai",
        "opencode",
        ("run", TASK),
        (
            ("write", {"filePath": "{path}", "content": TEXT}),
            ("read", {"filePath": "{path}"}),
            ("bash", {"command": CAPITALS, "description": "capitals"}),
        ),
        environment={"OPENCODE_CONFIG": "{home}/opencode.json"},
        files={"opencode.json": json.dumps(_OPENCODE)},
    ),
    "cline": Agent(
        "cline",
        "cline",
        ("-P", "openai-compatible", "-m", MODEL, TASK),
        (
            ("editor", {"path": "{path}", "new_text": TEXT}),
            ("read_files", {"files": [{"path": "{path}"}]}),
            ("run_commands", {"commands": [CAPITALS]}),
        ),
        before=("auth", "-p", "openai", "-k", "x", "-m", MODEL, "-b", "{url}/v1"),
    ),
    "continue": Agent(
        "@continuedev/cli",
        "cn",
        ("--config", "{home}/continue.yaml", "--auto", "-p", TASK),
        (
            ("Write", {"filepath": "{path}", "content": TEXT}),
            ("Read", {"filepath": "{path}"}),
            ("Bash", {"command": CAPITALS}),
        ),
        files={"continue.yaml": _CONTINUE},
    ),
    "qwen-code": Agent(
        "@qwen-code/qwen-code",
        "qwen",
        ("--auth-type", "openai", "--openai-api-key", "x", "--openai-base-url", "{url}/v1", "-m", MODEL, "-y", "-p")
        + (TASK,),
        (
            ("write_file", {"file_path": "{path}", "content": TEXT}),
            ("read_file", {"file_path": "{path}"}),
            ("run_shell_command", {"command": CAPITALS, "is_background": False}),
        ),
    ),
    "aider": Agent(  # without tools: it runs the test after each edit, and sends its output back
        "pip:aider-chat",
        "aider",
        ("--model", f"openai/{MODEL}", *_AIDER.split(), "--auto-test", "--test-cmd")
        + (f"{CAPITALS}; grep -q hello a.txt", "--message", TASK, "a.txt"),
        (_WHOLE.format("helo\n"), _WHOLE.format("hell\n"), _WHOLE.format(TEXT)),
        environment={"OPENAI_API_BASE": "{url}/v1", "OPENAI_API_KEY": "x"},
    ),
}
