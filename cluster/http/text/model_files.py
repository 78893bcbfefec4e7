"""Reads the tokenizer and chat settings of a model folder. Used by `cluster.http.text.tokenizer`."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

logger = logging.getLogger(__name__)

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_json(path: Path) -> dict[str, Any]:
    """Return a file's JSON; {} without the file. Raises ValueError."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold a JSON object; download it again")
    return content


def read_tokenizer(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of tokenizer.json, with the tokens that only tokenizer_config.json has (`config`), as
    transformers adds them. Raises ValueError."""
    file = folder / "tokenizer.json"
    if not file.is_file() and (folder / "tekken.json").is_file():
        raise ValueError(f"{file}: missing; `aerie tekken {folder}` writes it from the tekken.json beside it")
    if not file.is_file():
        raise ValueError(f"{file}: missing; save the tokenizer in the fast format (transformers' save_pretrained)")
    try:
        tokenizer = Tokenizer.from_file(str(file))
        num_tokens = tokenizer.get_vocab_size(with_added_tokens=True)
    except Exception as error:  # the library raises `Exception` itself (tokenizers 0.23)
        raise ValueError(f"{file}: is no tokenizer ({error}); download it again") from None
    if num_tokens == 0:
        raise ValueError(f"{file}: has no tokens; download it again")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    _add_tokens(tokenizer, config.get("added_tokens_decoder"), folder / "tokenizer_config.json")
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, given: Any, file: Path) -> None:
    """Add tokens of tokenizer_config.json that the tokenizer lacks, in the order of their ids. A token that would get
    another id stays text, because the model would read another token."""
    entries = given if isinstance(given, dict) else {}
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for token_id in sorted((key for key in entries if key.isdecimal()), key=int):
        fields = entries[token_id]
        content = fields.get("content") if isinstance(fields, dict) else None
        if not isinstance(content, str) or content in known:
            continue
        own = tokenizer.token_to_id(content)
        next_id = tokenizer.get_vocab_size(with_added_tokens=True) if own is None else own
        if next_id == int(token_id):
            flags = {name: fields[name] for name in _TOKEN_FLAGS if isinstance(fields.get(name), bool)}
            tokenizer.add_tokens([AddedToken(content, **flags)])
        else:
            logger.warning("%s: token %r has id %s, but %d in tokenizer.json", file, content, token_id, next_id)


def special_tokens(config: Mapping[str, Any], saved_map: Mapping[str, Any]) -> dict[str, str]:
    """Return the named special tokens; tokenizer_config.json overrides the older special_tokens_map.json."""
    tokens = {}
    for name in SPECIAL_NAMES:
        value = config.get(name) or saved_map.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def template_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the chat templates, by name. As in transformers, "tool_use" is for chats with tools and
    "default" for the others, and template files replace those of tokenizer_config.json. Raises ValueError."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    found = {name: read_text(file) for name, file in files.items() if file.is_file()}
    if found:
        return found
    given = config.get("chat_template")
    entries = given if isinstance(given, list) else [{"name": "default", "template": given}]
    named = [(entry.get("name"), entry.get("template")) for entry in entries if isinstance(entry, dict)]
    return {name: text for name, text in named if isinstance(name, str) and isinstance(text, str)}


def read_text(file: Path) -> str:
    """Return the text of a chat template's file. Raises ValueError."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: is no text ({error}); download it again") from None


def response_template(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the response template. Raises ValueError for one that this version of transformers does not support."""
    template = config.get("response_template")
    if template is None:
        return None
    from transformers.utils.chat_parsing.response_templates import load_response_template

    try:
        load_response_template(template)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"tokenizer_config.json: response_template: {error}; correct or remove it, and choose "
            "ingress.output_parser yourself"
        ) from None
    return dict(template)


def sampling_defaults(path: Path) -> dict[str, float]:
    """Return the sampling parameters of generation_config.json, by name. Raises ValueError for values that are no
    numbers."""
    content = read_json(path)
    found = {name: content[name] for name in SAMPLING_DEFAULTS if content.get(name) is not None}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{path}: {name}={value!r}: must be a number; correct or remove it")
    return found


def eos_ids(path: Path) -> list[int]:
    """Return the end-of-sequence ids of generation_config.json or config.json. Raises ValueError for invalid ids."""
    value = read_json(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(each) is int for each in ids):
        raise ValueError(f"{path}: eos_token_id={value!r}: must be a token id, or a list of token ids")
    return ids
