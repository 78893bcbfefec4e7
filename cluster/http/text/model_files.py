"""Reads the tokenizer and chat settings of a model folder. Used by `cluster.http.text.tokenizer`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
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


def template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the chat template's text. Raises ValueError."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(f"{file}: is no text ({error}); download it again") from None
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates
        named = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
        source = named[0].get("template") if named else None
    return source if isinstance(source, str) else None


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
