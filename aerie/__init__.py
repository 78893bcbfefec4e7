"""Aerie as a library: `aerie.LLM`, `aerie.SamplingParams` and what `LLM` returns.

    import aerie

    with aerie.LLM("eagle") as llm:
        print(llm.chat([{"role": "user", "content": "Hello!"}])[0].outputs[0].text)

Names are imported at their first use, because that imports torch. The server's code is in `attention`, `workers`,
`speculative`, `cluster` and `deploy`.

command  the entry point of the command `aerie`
shadows  whether other modules hide Aerie's
"""

import importlib
from typing import TYPE_CHECKING, Any

from aerie.shadows import hidden

if TYPE_CHECKING:
    from deploy.offline import LLM as LLM
    from deploy.offline import CompletionOutput as CompletionOutput
    from deploy.offline import RequestOutput as RequestOutput
    from deploy.offline import SamplingParams as SamplingParams

    __version__: str

_FROM_OFFLINE = ("LLM", "SamplingParams", "RequestOutput", "CompletionOutput")

__all__ = [*_FROM_OFFLINE, "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    """Import a public name. Raises ImportError if other modules hide Aerie's."""
    if name not in __all__:
        raise AttributeError(f"module 'aerie' has no attribute '{name}'; it has {', '.join(__all__)}")
    if fault := hidden():
        raise ImportError(fault)
    if name == "__version__":
        from attention.distribution import version

        return version()
    return getattr(importlib.import_module("deploy.offline"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
