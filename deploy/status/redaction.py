"""Removes secrets from text and configurations before they leave a machine. Used by `aerie.deploy.status.bundle`."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

REMOVED = "(removed)"
_MIN_LENGTH = 6  # shorter values would be found in ordinary words
# Names of variables and keys with secret values. `token` alone, not `max_tokens`, `tokenizer` or `token_map`.
_WORDS = r"api[_-]?keys?|access[_-]?key|secret|passw(?:or)?d|credentials?|private[_-]?key"
_SECRET_NAME = rf"(?:[\w.-]*(?:{_WORDS})[\w-]*|(?:[\w.-]*[_-])?(?:auth[_-]?)?token)"
_IS_SECRET_NAME = re.compile(rf"(?i){_SECRET_NAME}")
_KEYS = ("api_keys",)  # their values are secret, whatever the names below them
_PATTERNS = (
    re.compile(r"(?i)(\b(?:bearer|basic)\s+)([\w.~+/=-]{6,})"),
    re.compile(rf"(?i)(--?{_SECRET_NAME}[= ]\s*)([^\s\"',;]+)"),
    re.compile(rf"(?i)({_SECRET_NAME}[\"']?\s*[=:]\s*[\"']?)([^\s\"',;}}\]]{{3,}})"),
    re.compile(r"(://[^/\s:@]*:)([^@\s/]+)(?=@)"),
    re.compile(r"(\b)((?:sk|pk|hf|ghp|gho|glpat|xox[abp])[-_][\w-]{8,})"),
    re.compile(r"(\b)(AKIA[0-9A-Z]{12,}|eyJ[\w-]{8,}\.[\w-]+\.[\w-]*)"),
    re.compile(r"(\b)([0-9a-f]{64})\b"),  # Ray's tokens, and digests of API keys
)


def is_secret_name(name: str) -> bool:
    """Whether a variable or key of this name has a secret value."""
    return _IS_SECRET_NAME.fullmatch(name) is not None


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """Return `text` without `secrets` and without what looks like one: keys, tokens, passwords in URLs."""
    for secret in sorted({each for each in secrets if len(each) >= _MIN_LENGTH}, key=len, reverse=True):
        text = text.replace(secret, REMOVED)
    for pattern in _PATTERNS:
        text = pattern.sub(lambda match: match[1] + REMOVED, text)
    return text


def without_secrets(content: Any, is_secret: bool = False) -> Any:
    """Return a configuration with the values of secret keys removed; names of API keys stay."""
    if isinstance(content, Mapping):
        return {
            name: value
            if is_secret and name in ("name", "file", "admin")
            else without_secrets(value, is_secret or name in _KEYS or is_secret_name(str(name)))
            for name, value in content.items()
        }
    if isinstance(content, list | tuple):
        return [without_secrets(value, is_secret) for value in content]
    return REMOVED if is_secret and isinstance(content, str) else content


def secrets_of(content: Any, is_secret: bool = False) -> Iterator[str]:
    """Yield the values that `without_secrets` removes."""
    if isinstance(content, Mapping):
        for name, value in content.items():
            if not (is_secret and name in ("name", "file", "admin")):
                yield from secrets_of(value, is_secret or name in _KEYS or is_secret_name(str(name)))
    elif isinstance(content, list | tuple):
        for value in content:
            yield from secrets_of(value, is_secret)
    elif is_secret and isinstance(content, str):
        yield content
