"""Converts prompts of all forms to token ids. Raises ApiError for invalid ones. `prompt_embeds` of completions are
base64 of tensors written by `torch.save`, as vLLM's clients send them; they are read without torch and pickle: the
operations that describe a plain tensor are read as data, others are refused."""

import io
import pickletools
import zipfile
from binascii import a2b_base64
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal

from aerie.cluster.http.config import EdgeConfig
from aerie.cluster.http.errors import ApiError, invalid, too_long
from aerie.cluster.http.schema.message import ImagePart, Message, MessageToolCall, RefusalPart, TextPart, Tool
from aerie.cluster.http.text.chat_template import ChatTemplateError, ContinuationError
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.cluster.http.text.user_text import ChatText, TooManyTokensError, Truncation
from aerie.workers.prompt_inputs import Embeddings, PromptInputs

MAX_TEMPLATE_VARIABLES = 32  # maximum entries of chat_template_kwargs
RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


async def encode_prompt(
    text: str | ChatText,
    add_special_tokens: bool,
    param: str,
    tokenizer: ChatTokenizer,
    config: EdgeConfig,
    truncation: Truncation | None = None,
) -> list[int]:
    """Return the tokens of a prompt's text. A text that certainly exceeds the model's length is refused before it is
    encoded. truncation: return only this part of the tokens, and perhaps a few more."""
    longest = config.max_bytes_per_token or tokenizer.longest_token_bytes
    # A text has at least len(text) bytes; counting bytes copies it.
    if truncation is None and longest and len(text) > longest * config.max_model_len:
        raise _too_long(f"{len(text)} characters, which are more tokens in any case", param, config)
    try:
        return await tokenizer.encode(text, add_special_tokens, config.max_model_len, truncation)
    except TooManyTokensError as error:
        raise _too_long(f"more than {error.num_tokens} tokens", param, config) from None


def _too_long(size: str, param: str, config: EdgeConfig) -> ApiError:
    """Return the error of a prompt of this size, such as "more than 8192 tokens"."""
    return too_long(
        f"This model's maximum context length is {config.max_model_len} tokens, prompt and answer together, but the "
        f"prompt has {size}; shorten it",
        param,
    )


async def chat_text(
    messages: Sequence[Message],
    tokenizer: ChatTokenizer,
    add_generation_prompt: bool,
    variables: Mapping[str, Any] | None,
    tools: Sequence[Tool] = (),
    continue_final_message: bool = False,
) -> ChatText:
    """Render messages with the model's template. variables: `chat_template_kwargs`, further variables of the
    template."""
    turns = [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]
    _check_variables(variables or {})
    if continue_final_message and add_generation_prompt:
        raise invalid("continue_final_message", "continue_final_message needs add_generation_prompt: false")
    shown = [template_tool(tool) for tool in tools]
    try:
        return await tokenizer.rendered(turns, add_generation_prompt, variables, shown, continue_final_message)
    except ContinuationError as error:
        raise invalid("continue_final_message", str(error)) from None
    except ChatTemplateError as error:
        raise invalid("messages", str(error), "chat_template_error") from None


def template_tool(tool: Tool) -> dict[str, Any]:
    """Return a tool as it was sent, without null and without fields that are ignored."""
    return tool.as_sent() | {"function": tool.function.as_sent()}


def listed_prompts(prompt: Any, max_prompts: int, tokenizer: ChatTokenizer) -> list[str | list[int]]:
    """Return the `prompt` of a completion request (a string, strings, token ids or lists of token ids) as a list."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt is None:
        raise invalid("prompt", "Missing required parameter: prompt", "missing_required_parameter")
    if not isinstance(prompt, list):
        raise invalid(
            "prompt", "prompt must be a string, a list of strings, a list of token ids or a list of such lists"
        )
    if not prompt:
        raise invalid("prompt", "prompt must not be empty")
    if type(prompt[0]) is int:
        return [check_token_ids("prompt", prompt, tokenizer)]
    if len(prompt) > max_prompts:
        raise invalid("prompt", f"{len(prompt)} prompts are more than {max_prompts}; send several requests")
    listed: list[str | list[int]] = []
    kind = type(prompt[0])
    for i, entry in enumerate(prompt):
        if kind not in (str, list) or type(entry) is not kind:
            raise invalid(f"prompt[{i}]", f"prompt[{i}] must be a string or a list of token ids, the same for all")
        listed.append(entry if isinstance(entry, str) else check_token_ids(f"prompt[{i}]", entry, tokenizer))
    return listed


def check_token_ids(param: str, ids: Any, tokenizer: ChatTokenizer) -> list[int]:
    """Return `ids` if it is a list of tokens of the model, which may emit more than its tokenizer knows."""
    if not isinstance(ids, list):
        raise invalid(param, f"{param} must be a list of token ids")
    last = tokenizer.num_ids - 1
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= last:
        return list(ids)  # several times faster than the search for the invalid id, for prompts of 100,000 tokens
    for i, token in enumerate(ids):
        if type(token) is not int or not 0 <= token <= last:
            raise invalid(f"{param}[{i}]", f"{param}[{i}] must be a token id from 0 to {last}")
    return list(ids)


def _turn(message: Message, where: str) -> dict[str, Any]:
    """Return a message as templates expect it: plain text content, tool arguments as objects, no empty fields."""
    if message.role != "assistant":
        for name in ("tool_calls", "reasoning_content", "reasoning", "refusal"):
            if getattr(message, name):
                raise invalid(f"{where}.{name}", f"{where}.{name} belongs to the assistant's messages only")
    content = message.refusal if message.content is None else message.content
    if content is None and not message.tool_calls and not (message.reasoning_content or message.reasoning):
        raise invalid(f"{where}.content", f"{where}.content must be a string or a list of text parts")
    has_images = isinstance(content, list) and any(isinstance(part, ImagePart) for part in content)
    shown = content_parts(content) if isinstance(content, list) and has_images else content_text(content or "")
    turn: dict[str, Any] = {"role": message.role, "content": shown}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
    if reasoning is not None:
        # Each template reads one of these names.
        turn["reasoning_content"] = turn["reasoning"] = turn["thinking"] = reasoning
    if message.tool_calls:
        turn["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return turn


def content_text(content: str | Sequence[TextPart | ImagePart | RefusalPart]) -> str:
    """Return a content's text. Parts are joined by line ends, as in vLLM."""
    if isinstance(content, str):
        return content
    texts = (part for part in content if not isinstance(part, ImagePart))
    return "\n".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in texts)


def sent_content(content: str | Sequence[TextPart | ImagePart | RefusalPart]) -> str | list[dict[str, Any]]:
    """Return a content as a chat has it: a text, or parts if it has images."""
    if isinstance(content, str) or not any(isinstance(part, ImagePart) for part in content):
        return content_text(content)
    return [
        {"type": "image_url", "image_url": {"url": part.url}}
        if isinstance(part, ImagePart)
        else {"type": "text", "text": content_text([part])}
        for part in content
    ]


def content_parts(content: Sequence[TextPart | ImagePart | RefusalPart]) -> list[dict[str, str]]:
    """Return a content with images as chat templates expect it, which have a placeholder for each image."""
    return [
        {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": content_text([part])}
        for part in content
    ]


def _tool_call(call: MessageToolCall) -> dict[str, Any]:
    """Return a call of an earlier answer as templates expect it."""
    turn = {"type": "function", "function": {"name": call.function.name, "arguments": call.function.arguments}}
    return turn if call.id is None else {"id": call.id, **turn}


def _check_variables(variables: Mapping[str, Any]) -> None:
    if len(variables) > MAX_TEMPLATE_VARIABLES:
        raise invalid("chat_template_kwargs", f"chat_template_kwargs may have at most {MAX_TEMPLATE_VARIABLES} entries")
    for name, value in variables.items():
        where = f"chat_template_kwargs.{name[:64]}"
        if name in RESERVED_VARIABLES or name.endswith("_token"):
            raise invalid(where, f"{where} is set by the server")
        if not isinstance(value, str | int | float | bool | None):
            raise invalid(where, f"{where} must be a string, a number, a boolean or null")


PARAM = "prompt_embeds"
PLACEHOLDER = 0  # the token id of each row
_MAX_DESCRIPTION = 4096  # bytes; a tensor's has 157
_DTYPES: dict[str, tuple[Literal["float32", "float16", "bfloat16"], int]] = {
    "torch FloatStorage": ("float32", 4),
    "torch HalfStorage": ("float16", 2),
    "torch BFloat16Storage": ("bfloat16", 2),
}


def read_embeds(value: Any, max_prompts: int) -> list[PromptInputs]:
    """Return the inputs of each prompt: one for a text, several for a list of them. Raises ApiError."""
    listed = value if isinstance(value, list) else [value]
    if not 1 <= len(listed) <= max_prompts or not all(isinstance(text, str) for text in listed):
        raise invalid(PARAM, f"{PARAM} must be a string, or a list of 1 to {max_prompts} strings")
    prompts = []
    for i, text in enumerate(listed):
        where = f"{PARAM}[{i}]" if listed is value else PARAM
        try:
            prompts.append(PromptInputs((_embeddings(text),)))
        except (ValueError, TypeError, LookupError, NotImplementedError, zipfile.BadZipFile) as error:
            rule = "must be base64 of the bytes of torch.save, of a contiguous tensor [tokens, hidden_size]"
            raise invalid(where, f"{where}: {rule} of float32, float16 or bfloat16 ({str(error)[:200]})") from None
    return prompts


def _embeddings(text: str) -> Embeddings:
    """Return the tensor of a file that `torch.save` wrote, in base64, without executing its pickle.

    Raises ValueError, and for a file of another origin what zipfile and indexing of its description raise.
    """
    with zipfile.ZipFile(io.BytesIO(a2b_base64(text, strict_mode=True))) as archive:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
            raise ValueError("the file is compressed")
        if entries["data.pkl"].file_size > _MAX_DESCRIPTION:
            raise ValueError("the file has more than a tensor")
        if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
            raise ValueError("the file is not little-endian")
        function, (storage, offset, shape, stride, *_) = _described(archive.read(entries["data.pkl"]))
        if function != "torch._utils _rebuild_tensor_v2" or storage[1] not in _DTYPES:
            raise ValueError(f"it is {function} of {storage[1]}")
        stored = archive.read(entries[f"data/{storage[2]}"])
    dtype, itemsize = _DTYPES[storage[1]]
    rows, columns = shape
    if min(rows, columns) < 1 or stride != (columns, 1):
        raise ValueError(f"it has shape {shape} and stride {stride}")
    data = stored[offset * itemsize : (offset + rows * columns) * itemsize]
    if offset < 0 or len(data) != rows * columns * itemsize:
        raise ValueError(f"it has {len(data)} bytes for shape {shape}")
    facts = f"{dtype} {columns} ".encode()
    return Embeddings(0, rows, data, blake2b(facts + data, digest_size=32).digest(), dtype)


def _described(pickled: bytes) -> Any:
    """Return the value of a pickle of tuples, texts and numbers; calls are (function's name, arguments)."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    argument: Any
    for operation, argument, _ in pickletools.genops(pickled):
        match operation.name:
            case "PROTO":
                pass
            case "GLOBAL" | "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
                stack.append(argument)
            case "NEWTRUE" | "NEWFALSE" | "EMPTY_TUPLE":
                stack.append({"NEWTRUE": True, "NEWFALSE": False}.get(operation.name, ()))
            case "BINPUT":
                memo[argument] = stack[-1]
            case "BINGET":
                stack.append(memo[argument])
            case "MARK":
                marks.append(len(stack))
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                begin = marks.pop() if operation.name == "TUPLE" else len(stack) - int(operation.name[-1])
                stack[begin:] = [tuple(stack[begin:])]
            case "REDUCE":
                stack[-2:] = [(stack[-2], stack[-1])]
            case "BINPERSID":  # the storage, which is described by a tuple
                pass
            case "STOP":
                return stack[-1]
            case name:
                raise ValueError(f"it is more than a tensor: {name}")
    raise ValueError("it has no end")
