"""Reads a model folder's tokenizer, for the HTTP API and for grammars alike. Plain `tokenizers`, no torch."""

import json
import logging
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

logger = logging.getLogger(__name__)

_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


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


def read_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of tokenizer.json, with the tokens that only tokenizer_config.json has, as transformers
    adds them. Raises ValueError."""
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
    settings = folder / "tokenizer_config.json"
    _add_tokens(tokenizer, read_json(settings).get("added_tokens_decoder"), settings)
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
