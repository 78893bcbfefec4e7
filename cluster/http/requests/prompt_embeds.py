"""Reads `prompt_embeds` of completions: base64 of tensors written by `torch.save`, as vLLM's clients send them.

Without torch and without pickle: the few operations that describe a plain tensor are read as data, others are refused.
"""

import io
import pickletools
import zipfile
from binascii import a2b_base64
from hashlib import blake2b
from typing import Any, Literal

from aerie.cluster.http.errors import invalid
from aerie.workers.prompt_inputs import Embeddings, PromptInputs

PARAM = "prompt_embeds"
PLACEHOLDER = 0  # the token id of each row
_MAX_DESCRIPTION = 4096  # bytes; a tensor's has 157
_DTYPES: dict[str, tuple[Literal["float32", "float16", "bfloat16"], int]] = {
    "torch FloatStorage": ("float32", 4),
    "torch HalfStorage": ("float16", 2),
    "torch BFloat16Storage": ("bfloat16", 2),
}


def read_embeds(given: Any, max_prompts: int) -> list[PromptInputs]:
    """Return the inputs of each prompt: one for a text, several for a list of them. Raises ApiError."""
    listed = given if isinstance(given, list) else [given]
    if not 1 <= len(listed) <= max_prompts or not all(isinstance(text, str) for text in listed):
        raise invalid(PARAM, f"{PARAM} must be a string, or a list of 1 to {max_prompts} strings")
    found = []
    for i, text in enumerate(listed):
        where = f"{PARAM}[{i}]" if listed is given else PARAM
        try:
            found.append(PromptInputs((_embeddings(text),)))
        except (ValueError, TypeError, LookupError, NotImplementedError, zipfile.BadZipFile) as error:
            rule = "must be base64 of the bytes of torch.save, of a contiguous tensor [tokens, hidden_size]"
            raise invalid(where, f"{where}: {rule} of float32, float16 or bfloat16 ({str(error)[:200]})") from None
    return found


def _embeddings(text: str) -> Embeddings:
    """Raises ValueError, and what a foreign file makes zipfile and the indexing of its description raise."""
    with zipfile.ZipFile(io.BytesIO(a2b_base64(text, strict_mode=True))) as archive:
        entries = {each.filename.partition("/")[2]: each for each in archive.infolist()}
        if any(each.compress_type != zipfile.ZIP_STORED for each in entries.values()):
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
