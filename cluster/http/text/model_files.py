"""Reads the tokenizer and chat settings of a model folder. Used by `aerie.cluster.http.text.tokenizer`."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aerie.cluster.http.config import SERVER_DEFAULTS
from aerie.workers.structured_output.token_bytes import read_json

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


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
    texts = {name: read_text(file) for name, file in files.items() if file.is_file()}
    if texts:
        return texts
    declared = config.get("chat_template")
    entries = declared if isinstance(declared, list) else [{"name": "default", "template": declared}]
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
    defaults = {name: content[name] for name in SERVER_DEFAULTS if content.get(name) is not None}
    for name, value in defaults.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{path}: {name}={value!r}: must be a number; correct or remove it")
    return defaults


def num_model_ids(path: Path) -> int:
    """Return the rows of the model's embedding by config.json; 0 if it does not say. `aerie.deploy.checks` compares it
    with the model's own."""
    config = read_json(path)
    text = config.get("text_config")
    size = (text if isinstance(text, dict) and text else config).get("vocab_size")
    return size if type(size) is int else 0


def eos_ids(path: Path) -> list[int]:
    """Return the end-of-sequence ids of generation_config.json or config.json. Raises ValueError for invalid ids."""
    value = read_json(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise ValueError(f"{path}: eos_token_id={value!r}: must be a token id, or a list of token ids")
    return ids
