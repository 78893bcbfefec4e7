"""Aerie as a library: `LLM`, `AsyncLLM`, their parameters and outputs, under vLLM's names (`docs/python-api.md`).

    from aerie import LLM

    with LLM("eagle") as llm:
        print(llm.chat([{"role": "user", "content": "Hello!"}])[0].outputs[0].text)

`RequestError` is what Serve's handles raise (`docs/serve-handles.md`).

Names are imported at their first use, because that imports torch. The server's code is in `aerie.kernels`,
`aerie.attention`, `aerie.workers`, `aerie.speculative`, `aerie.cluster` and `aerie.deploy`: in a checkout, links to the
folders beside it.

command  the entry point of the command `aerie`
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aerie.cluster.http.errors import RequestError as RequestError
    from aerie.deploy.offline.async_llm import AsyncLLM as AsyncLLM
    from aerie.deploy.offline.engine import AsyncEngineArgs as AsyncEngineArgs
    from aerie.deploy.offline.engine import EngineArgs as EngineArgs
    from aerie.deploy.offline.engine_thread import EngineDeadError as EngineDeadError
    from aerie.deploy.offline.llm import LLM as LLM
    from aerie.deploy.offline.outputs import CompletionOutput as CompletionOutput
    from aerie.deploy.offline.outputs import Counter as Counter
    from aerie.deploy.offline.outputs import Gauge as Gauge
    from aerie.deploy.offline.outputs import Histogram as Histogram
    from aerie.deploy.offline.outputs import Logprob as Logprob
    from aerie.deploy.offline.outputs import RequestOutput as RequestOutput
    from aerie.deploy.offline.outputs import RequestStateStats as RequestStateStats
    from aerie.deploy.offline.prompts import LoRARequest as LoRARequest
    from aerie.deploy.offline.prompts import TextPrompt as TextPrompt
    from aerie.deploy.offline.prompts import TokensPrompt as TokensPrompt
    from aerie.deploy.offline.sampling_params import RequestOutputKind as RequestOutputKind
    from aerie.deploy.offline.sampling_params import SamplingParams as SamplingParams
    from aerie.deploy.offline.sampling_params import StructuredOutputsParams as StructuredOutputsParams

    __version__: str

_OFFLINE = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "AsyncEngineArgs": "engine",
    "EngineArgs": "engine",
    "EngineDeadError": "engine_thread",
    "LoRARequest": "prompts",
    "Counter": "outputs",
    "Gauge": "outputs",
    "Histogram": "outputs",
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

_MODULES = {name: f"aerie.deploy.offline.{module}" for name, module in _OFFLINE.items()}
_MODULES["RequestError"] = "aerie.cluster.http.errors"

__all__ = [*_MODULES, "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    """Import a public name."""
    if name not in __all__:
        raise AttributeError(f"module 'aerie' has no attribute '{name}'; it has {', '.join(__all__)}")
    if name == "__version__":
        from aerie.attention.distribution import version

        return version()
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
