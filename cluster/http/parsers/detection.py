"""Detects a model's answer format from its chat template, because models write turns like the template."""

from cluster.http.config import OutputParserName

# The first row whose marks are all in the template decides. Marks are more reliable than the architecture: DeepSeek's
# distillations of Llama and Qwen have DeepSeek's template.
_MARKS: tuple[tuple[OutputParserName, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("gemma4", ("<|tool_call>call:",)),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("phi4_mini", ("<|tool_call|>", "<|/tool_call|>")),
    ("granite", ("<|tool_call|>", "<|start_of_role|>")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("pythonic", ("[func_name1(params_name1",)),
    ("llama3", ("<|start_header_id|>", "tools", "parameters")),
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    ("hermes", ("<tool_call>", "arguments")),
    ("think", ("</think>",)),
)
_OTHER_CALLS = ("<function=",)  # formats that use hermes' marks for other content


def detect_parser(template: str | None, has_response_template: bool) -> OutputParserName:
    """Return a model's row of `cluster.http.parsers.table.PARSERS`. template: source of its chat template."""
    if has_response_template:
        return "response_template"
    source = template or ""
    for name, marks in _MARKS:
        if all(mark in source for mark in marks) and not (
            name == "hermes" and any(mark in source for mark in _OTHER_CALLS)
        ):
            return name
    return "text"
