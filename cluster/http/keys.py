"""API keys. The server stores only SHA-256 digests: Ray Serve writes a deployment's arguments to its logs and sends
them to every process. Used by `aerie.cluster.http.config`, `aerie.cluster.http.tenants` and
`aerie.deploy.config.files`."""

import dataclasses
import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from aerie.attention.setting import Setting, check_settings

PREFIX = "sha256:"
_DIGEST = re.compile(rf"{PREFIX}[0-9a-f]{{64}}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
MAX_WEIGHT, MAX_PRIORITY = 1000.0, 100
_LIMIT = Setting(gt=0, rule="above 0, or null for no limit")
_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrent_requests")


@dataclass(frozen=True)
class KeyConfig:
    """An API key with a name: a tenant. docs/tenants.md explains what the server shares out between tenants.

    name: its name in logs and metrics, 1 to 64 letters, digits, dots, hyphens and underscores.
    key: the key, `sha256:` and its digest, or a list of several, to replace one by another.
    file: instead of `key`, a file with a key per line, read at the start on the machine that reads the configuration.
    requests_per_minute: more get 429; null: no limit. With several ingresses, each has an equal part.
    tokens_per_minute: prompt and output tokens; as above.
    max_concurrent_requests: generations in flight; as above.
    weight: its share of an engine's tokens, relative to other keys, while requests wait.
    priority_limit: the most urgent `priority` of its requests; lower numbers are more urgent.
    learn: whether a draft may learn from its texts (docs/learning-draft.md).
    admin: whether it may empty the prefix cache and read all keys' counts; null: only if it is the only key.
    """

    name: str
    key: str | tuple[str, ...] = ""
    file: str = ""
    requests_per_minute: Annotated[float | None, _LIMIT] = None
    tokens_per_minute: Annotated[float | None, _LIMIT] = None
    max_concurrent_requests: Annotated[int | None, _LIMIT] = None
    weight: Annotated[float, Setting(ge=1 / MAX_WEIGHT, le=MAX_WEIGHT)] = 1.0
    priority_limit: Annotated[int, Setting(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    learn: bool = True
    admin: bool | None = None

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            raise ValueError("name: must be 1 to 64 letters, digits, dots, hyphens and underscores (A-Z a-z 0-9 . - _)")
        check_settings(self)
        if bool(self.key) == bool(self.file):
            raise ValueError("key: give either `key` or `file`")
        keys = (self.key,) if isinstance(self.key, str) else self.key
        object.__setattr__(self, "key", tuple(digest(key, "key") for key in keys if key))

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests of its keys; none before `read`."""
        assert not isinstance(self.key, str), "the constructor makes a tuple of it"
        return self.key

    def read(self, base: Path) -> "KeyConfig":
        """Return the key with the digests of its file's keys instead of the file. A relative path starts at `base`.

        Raises ValueError."""
        if not self.file:
            return self
        path = base / Path(self.file).expanduser()
        try:
            lines = path.read_text().split()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "is not text"
            raise ValueError(f"file={self.file}: {path} cannot be read ({reason})") from None
        if not lines:
            raise ValueError(f"file={self.file}: {path} is empty; write a key per line into it")
        return dataclasses.replace(self, key=tuple(digest(line, "file") for line in lines), file="")

    def part(self, num_ingresses: int) -> "KeyConfig":
        """Return the key with the limits of one of `num_ingresses` ingresses. Raises ValueError if a limit is too small
        to be divided."""
        if num_ingresses == 1:
            return self
        parts: dict[str, float | int] = {}
        for name in _LIMITS:
            limit = getattr(self, name)
            if limit is not None and limit < num_ingresses:
                raise ValueError(
                    f"{name}={limit:g} of {self.name}: each of {num_ingresses} ingresses has a part of it, so it must "
                    f"be at least {num_ingresses}; raise it, or set ingress.num_replicas: 1"
                )
            if limit is not None:
                parts[name] = limit / num_ingresses if name.endswith("minute") else limit // num_ingresses
        return dataclasses.replace(self, **parts)  # type: ignore[arg-type]


def checked(entries: Iterable[str | KeyConfig]) -> tuple[str | KeyConfig, ...]:
    """Return `ingress.api_keys` with digests instead of keys. Raises ValueError."""
    hashed = tuple(digest(entry) if isinstance(entry, str) else entry for entry in entries)
    keys = named(hashed)
    digests = [value for key in keys for value in key.digests]
    if len(set(digests)) < len(digests):
        raise ValueError("api_keys: one key is given twice; give each key once, so that it has one name")
    names = [key.name for key in keys]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"api_keys: two keys are named {twice[0]}; a key without a name is called key- and its place")
    return hashed


def named(entries: Sequence[str | KeyConfig]) -> tuple[KeyConfig, ...]:
    """Return the keys with names: `key-N` for the N-th entry if it is a plain key."""
    return tuple(
        KeyConfig(f"key-{number}", entry) if isinstance(entry, str) else entry
        for number, entry in enumerate(entries, start=1)
    )


def digest(entry: str, field: str = "api_keys") -> str:
    """Return the digest of a configured key, "sha256:" and 64 hexadecimal digits. An entry may be a digest.

    Raises ValueError, whose text begins with `field` and does not quote the key."""
    if entry.lower().startswith(PREFIX):
        if _DIGEST.fullmatch(entry.lower()):
            return entry.lower()
        raise ValueError(f"{field}: after {PREFIX} there must be 64 hexadecimal digits, as `sha256sum` prints them")
    if len(entry) < 8 or not entry.isascii() or not entry.isprintable() or " " in entry:
        raise ValueError(f"{field}: each key must have at least 8 printable ASCII characters and no space")
    return _digest(entry)


def matches(key: str, digests: Iterable[str]) -> bool:
    """Whether a client's key has one of the `digests`. A digest itself is not a key. Takes the same time for every
    key."""
    hashed = _digest(key)
    equal = [hmac.compare_digest(hashed, own) for own in digests]
    return any(equal)


def _digest(key: str) -> str:
    return PREFIX + hashlib.sha256(key.encode()).hexdigest()
