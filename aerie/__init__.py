"""Aerie as a library: `LLM`, `AsyncLLM`, their parameters and outputs, under vLLM's names (`docs/python-api.md`).

    from aerie import LLM

    with LLM("eagle") as llm:
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
    from deploy.offline.async_llm import AsyncLLM as AsyncLLM
    from deploy.offline.engine import AsyncEngineArgs as AsyncEngineArgs
    from deploy.offline.engine import EngineArgs as EngineArgs
    from deploy.offline.engine_thread import EngineDeadError as EngineDeadError
    from deploy.offline.llm import LLM as LLM
    from deploy.offline.metrics import Counter as Counter
    from deploy.offline.metrics import Gauge as Gauge
    from deploy.offline.metrics import Histogram as Histogram
    from deploy.offline.outputs import CompletionOutput as CompletionOutput
    from deploy.offline.outputs import Logprob as Logprob
    from deploy.offline.outputs import RequestOutput as RequestOutput
    from deploy.offline.outputs import RequestStateStats as RequestStateStats
    from deploy.offline.prompts import TextPrompt as TextPrompt
    from deploy.offline.prompts import TokensPrompt as TokensPrompt
    from deploy.offline.sampling_params import RequestOutputKind as RequestOutputKind
    from deploy.offline.sampling_params import SamplingParams as SamplingParams
    from deploy.offline.sampling_params import StructuredOutputsParams as StructuredOutputsParams

    __version__: str

_MODULES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "AsyncEngineArgs": "engine",
    "EngineArgs": "engine",
    "EngineDeadError": "engine_thread",
    "Counter": "metrics",
    "Gauge": "metrics",
    "Histogram": "metrics",
    "CompletionOutput": "outputs",
    "Logprob": "outputs",
    "RequestOutput": "outputs",
    "TextPrompt": "prompts",
    "TokensPrompt": "prompts",
    "RequestOutputKind": "sampling_params",
    "RequestStateStats": "outputs",
    "SamplingParams": "sampling_params",
    "StructuredOutputsParams": "sampling_params",
}

__all__ = [*_MODULES, "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    """Import a public name. Raises ImportError if other modules hide Aerie's."""
    if name not in __all__:
        raise AttributeError(f"module 'aerie' has no attribute '{name}'; it has {', '.join(__all__)}")
    if fault := hidden():
        raise ImportError(fault)
    if name == "__version__":
        from attention.distribution import version

        return version()
    return getattr(importlib.import_module(f"deploy.offline.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
