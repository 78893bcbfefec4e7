"""The distribution that Aerie is installed as. Its name differs from the command's and from the package's, because
`aerie` on PyPI is another project. Every remedy that names a package to install takes the name from here.
"""

import importlib.metadata

NAME = "aerie-serve"
STRANGER = "aerie"  # also installs a package `aerie`; of both, the one that is installed last is imported


def install_command(extra: str = "") -> str:
    """Return the command that installs Aerie. extra: one of pyproject.toml's optional dependencies."""
    return f"pip install '{NAME}[{extra}]'" if extra else f"pip install {NAME}"


def version() -> str:
    """Return the version of the installed distribution."""
    try:
        return importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed as a package)"
