"""Aerie's distribution, for error messages that say what to install: its name, and where this installation came from.

The distribution is not named as the command and the package, because `aerie` on PyPI is another project.
"""

import importlib.metadata
import json
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

NAME = "aerie-serve"
STRANGER = "aerie"  # another distribution with a package `aerie`; whichever is installed last is imported
_ROOT = Path(__file__).resolve().parents[1]  # the checkout, or site-packages


def install_command(extra: str = "") -> str:
    """Return the command that installs Aerie again, from where this installation came: a checkout, a wheel, an address
    or a package index. extra: one of pyproject.toml's optional dependencies."""
    return f"{pip('install')} {' '.join(_source(f'[{extra}]' if extra else '', extra))}"


def pip(command: str) -> str:
    """Return `pip install` or another command of pip for this interpreter, which need not be the first on PATH.
    Environments that uv makes have no pip."""
    program = shlex.quote(sys.executable)
    return f"{program} -m pip {command}" if find_spec("pip") else f"uv pip {command} --python {program}"


def version() -> str:
    """Return the version of the installed distribution."""
    try:
        return importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed as a package)"


def _source(brackets: str, extra: str) -> list[str]:
    """Return pip's arguments that name the source with its extra."""
    origin = _origin()
    url = str(origin.get("url", ""))
    path = Path(url2pathname(urlsplit(url).path)) if url.startswith("file:") else None
    if path is not None and not path.exists():  # a wheel that was deleted after the installation
        wanted = [requirement.partition(";")[0].strip() for requirement in _requirements(extra)]
        return [shlex.quote(requirement) for requirement in wanted] or [NAME]
    if path is not None:
        flag = ["-e"] if origin.get("dir_info", {}).get("editable") else []
        return [*flag, shlex.quote(f"{path}{brackets}")]
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return [shlex.quote(f"{NAME}{brackets} @ {url}" if url else f"{NAME}{brackets}")]


def _origin() -> dict[str, Any]:
    """Return the record that pip and uv keep of an installation from a folder or an address (direct_url.json, PEP 610);
    empty for one from a package index. Modules that lie in a checkout are installed from there, or on Python's path."""
    if (_ROOT / "pyproject.toml").is_file():
        return {"url": _ROOT.as_uri(), "dir_info": {"editable": True}}
    try:
        text = importlib.metadata.distribution(NAME).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return {}
    return dict(json.loads(text)) if text else {}


def _requirements(extra: str) -> list[str]:
    """Return what an extra requires, as the installed distribution says."""
    listed = importlib.metadata.requires(NAME) or []
    return [requirement for requirement in listed if extra and f'extra == "{extra}"' in requirement.replace("'", '"')]
