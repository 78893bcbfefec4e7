"""The name of Aerie's distribution, for error messages that say what to install. It differs from the command's and the
package's, because `aerie` on PyPI is another project.
"""

import importlib.metadata

NAME = "aerie-serve"
STRANGER = "aerie"  # another distribution with a package `aerie`; whichever is installed last is imported


def install_command(extra: str = "") -> str:
    """Return the command that installs Aerie. extra: one of pyproject.toml's optional dependencies."""
    return f"pip install '{NAME}[{extra}]'" if extra else f"pip install {NAME}"


def version() -> str:
    """Return the version of the installed distribution."""
    try:
        return importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed as a package)"
