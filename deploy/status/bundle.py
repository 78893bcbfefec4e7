"""`aerie doctor --bundle FILE`: versions, findings, configuration, plan, status and recent logs in one archive, for a
bug report, without the secrets in them."""

import contextlib
import io
import os
import platform
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import yaml

from aerie.attention.distribution import version
from aerie.cluster.config import ConfigError
from aerie.deploy.access import token_path
from aerie.deploy.config.files import find_config
from aerie.deploy.processes.server_record import processes, records, sessions_of
from aerie.deploy.serve.console import log_folders

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
    for secret in sorted({value for value in secrets if len(value) >= _MIN_LENGTH}, key=len, reverse=True):
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


MAX_LOG_BYTES = 1 << 20  # bytes at the end of each log that are included
MAX_ALL_BYTES = 64 << 20  # bytes of all logs together; the newest are included
_RECENT_S = 7 * 24 * 3600.0  # logs older than a week are left out
_STATUS_LIMIT_S = 60.0  # maximum time of `aerie status`
_LOGS = (".log", ".out", ".err", ".log.1", ".json")
_VARIABLES = (
    "RAY_",
    "AERIE_",
    "NCCL_",
    "GLOO_",
    "CUDA_",
    "NVIDIA_",
    "HF_",
    "TORCH",
    "TRITON_",
    "OMP_",
    "MKL_",
    "TMPDIR",
)


def write_bundle(file: Path, source: str, findings: Sequence[str]) -> None:
    """Write the archive, readable for this user alone, and print what it contains.

    source: the configuration's file or packaged name.
    findings: lines of `aerie doctor`.
    Raises OSError."""
    content = _content(source)
    secrets = [*secrets_of(content), *_secret_values(os.environ), *_token(os.environ)]
    parts = {
        "versions.txt": _versions(),
        "findings.txt": "\n".join(findings),
        "environment.txt": _environment(os.environ),
        "config.yaml": content if isinstance(content, str) else yaml.safe_dump(without_secrets(content)),
        "plan.txt": _output("plan", source),
        "status.json": _output("status", "--json"),
    }
    began_s = time.time()
    num_logs = num_bytes = 0
    with (
        open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as raw,
        tarfile.open(fileobj=raw, mode="w:gz") as archive,
    ):
        os.fchmod(raw.fileno(), 0o600)
        for name, text in [*parts.items(), *_logs(began_s)]:
            data = redacted(text, secrets).encode()
            entry = tarfile.TarInfo(f"aerie-doctor/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(began_s), 0o600
            archive.addfile(entry, io.BytesIO(data))
            if name not in parts:
                num_logs, num_bytes = num_logs + 1, num_bytes + len(data)
    print(f"wrote {file}: {', '.join(parts)}, and {num_logs} logs of {num_bytes / 1e6:.1f} MB")
    print("secrets are removed, but read it before you send it; logs may name files and requests")


def _content(source: str) -> object:
    """Return the configuration as written, or why it cannot be read."""
    try:
        return yaml.safe_load(find_config(source).read_text())
    except (ConfigError, OSError, ValueError, yaml.YAMLError) as error:
        return f"cannot be read: {error}"


def _secret_values(environment: Mapping[str, str]) -> Iterator[str]:
    return (value for name, value in environment.items() if is_secret_name(name) and not os.path.exists(value))


def _token(environment: Mapping[str, str]) -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield token_path(environment).read_text().strip()
    for _, record, _ in records():
        with contextlib.suppress(OSError, KeyError):
            yield Path(record.ray["RAY_AUTH_TOKEN_PATH"]).read_text().strip()


def _environment(environment: Mapping[str, str]) -> str:
    shown = {name: value for name, value in environment.items() if name.startswith(_VARIABLES)}
    return "\n".join(f"{name}={REMOVED if is_secret_name(name) else value}" for name, value in sorted(shown.items()))


def _versions() -> str:
    packages = sorted(
        {f"{distribution.name} {distribution.version}" for distribution in distributions()}, key=str.lower
    )
    return "\n".join((f"aerie {version()}", f"Python {sys.version}", platform.platform(), *packages))


def _output(*words: str) -> str:
    """Return what a command of `aerie` prints, and its exit status."""
    command = [sys.executable, "-P", "-c", "import sys; from aerie.command import main; sys.exit(main())", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_STATUS_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"`aerie {words[0]}` did not end within {_STATUS_LIMIT_S:g} s"
    end = "" if done.returncode == 0 else f"\nexit status {done.returncode}"
    return f"{done.stdout}{done.stderr}{end}"


def _logs(now_s: float) -> Iterator[tuple[str, str]]:
    """Yield name and end of each recent log: Aerie's own, then those of Ray's sessions, the newest first."""
    left = MAX_ALL_BYTES
    places: list[tuple[str, Path, Iterable[Path]]] = []
    for folder in log_folders():
        places.append(("logs/aerie", folder, folder.glob("*.log*")))
    for session in _sessions():
        places.append((f"logs/ray/{session.name}", session / "logs", (session / "logs").rglob("*")))
    for title, root, paths in places:
        for path in _newest(paths, now_s):
            text = _end(path, min(MAX_LOG_BYTES, left))
            left -= len(text)
            if text:
                yield f"{title}/{path.relative_to(root)}", text


def _sessions() -> list[Path]:
    """Return the session folders of this user's Rays that run, or ended by a fault."""
    sessions = set()
    for folder, record, _ in records():
        sessions |= {record.session, *sessions_of(processes(folder))} - {""}
    return [Path(session) for session in sorted(sessions)]


def _newest(paths: Iterable[Path], now_s: float) -> list[Path]:
    """Return the recently changed log files, newest first."""
    changed: dict[Path, float] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            if path.name.endswith(_LOGS) and path.is_file() and not path.is_symlink():
                changed[path] = path.stat().st_mtime
    recent = [path for path, at_s in changed.items() if now_s - at_s < _RECENT_S]
    return sorted(recent, key=lambda path: -changed[path])


def _end(path: Path, limit: int) -> str:
    """Return the last `limit` bytes of a file, from the beginning of a line."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit))
            data = file.read(limit)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    text = data.decode(errors="replace")
    return text if size <= limit else text.partition("\n")[2]
