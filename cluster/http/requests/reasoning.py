"""Reads the reasoning parameters of a chat. Called by `cluster.http.requests.edge_request`."""

from cluster.http.config import EdgeConfig, OutputParserName
from cluster.http.errors import unsupported
from cluster.http.parsers.families import FAMILIES
from cluster.http.schema.request import ChatCompletionRequest
from cluster.http.text.tokenizer import ChatTokenizer
from cluster.http.thinking_budget import ThinkingBudget


def chat_parser(config: EdgeConfig) -> OutputParserName:
    """Return the parser of chats' answers."""
    assert config.output_parser != "auto", "the application's builder finds it"
    return config.output_parser


def separates_reasoning(body: ChatCompletionRequest, parser: OutputParserName) -> bool:
    """Return whether the reply has reasoning and content in separate fields. Raises ApiError."""
    separates = body.separate_reasoning is not False
    if not separates and parser in ("harmony", "response_template"):
        raise unsupported("separate_reasoning", "this model's answer format always separates reasoning")
    return separates


async def thinking_budget(
    body: ChatCompletionRequest, parser: OutputParserName, tokenizer: ChatTokenizer
) -> ThinkingBudget | None:
    """Return the request's limit of thinking tokens, None without one. Raises ApiError if the model's thinking has no
    marks."""
    limit = body.thinking_token_budget
    if limit is None or limit < 0:
        return None
    marks = FAMILIES[parser].thinking
    if marks is None or body.separate_reasoning is False:
        known = ", ".join(name for name, family in FAMILIES.items() if family.thinking is not None)
        raise unsupported("thinking_token_budget", f"answers have no thinking between marks; output parsers: {known}")
    if body.allowed_token_ids:
        raise unsupported("thinking_token_budget", "thinking cannot be ended with allowed_token_ids")
    closing = await tokenizer.encode(marks[1], add_special_tokens=False)
    return ThinkingBudget(limit, tuple(closing))
