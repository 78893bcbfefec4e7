"""The table of attention backends, the choice of the configured ones, and refusals.

Called where an engine is assembled. The interface is `aerie.attention.backend`; `aerie.attention.limits` says what each
backend supports. A backend's module is imported when it is built, so the table can be read on any machine.

The table is not an operation's: the configuration names a backend for each mode, and what it does not support is
refused at the start with a reason, where an operation would pass to the next row at a call.
"""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from aerie.attention.backend import AttentionBackend
from aerie.attention.config import BACKEND_NAMES, ROUNDS_ONLY
from aerie.attention.distribution import install_command
from aerie.attention.limits import (
    AttentionUse,
    flashinfer_refusal,
    score_refusal,
    torch_refusal,
    triton_refusal,
    trtllm_refusal,
)
from aerie.kernels.capability import is_installed
from aerie.kernels.kv.batches import Mode
from aerie.kernels.lazy_import import load
from aerie.kernels.operation import anywhere, on_gpu

ALL_MODES = frozenset(Mode)
DECODE_MODES = ALL_MODES - {Mode.PREFILL}
ALL_LAYOUTS = frozenset({"heads", "latent rows"})
ALL_SCORES = frozenset({"window", "soft_cap", "sinks"})
AUTO = (("triton", on_gpu), ("torch", anywhere))  # the first one that the device supports


@dataclass(frozen=True)
class BackendFacts:
    """A row of `BACKENDS`.

    target: the backend's class as "module:name"; importing the module imports the backend's libraries.
    refusal: returns why it does not support a use in one of its `modes` and `layouts`; None if it does.
    layouts: the kinds of `KVLayout` whose views it reads.
    cpu_seq_lens_modes: see `needs_cpu_seq_lens`; never includes prompt chunks, whose lengths come with the plan.
    chunks_on_device: whether it supports prompt chunks that only the device knows, so that steps with chunks can be
        captured.
    scores: the features of `ScoreRule` that it supports: window, soft_cap, sinks. `DecodeBatch.window` needs window.
    package: package of the extra `cuda` that it imports.
    """

    target: str
    refusal: Callable[[AttentionUse], str | None]
    modes: frozenset[Mode] = ALL_MODES
    layouts: frozenset[str] = frozenset({"heads"})
    cpu_seq_lens_modes: frozenset[Mode] = frozenset()
    chunks_on_device: bool = False
    scores: frozenset[str] = frozenset()
    package: str | None = None

    def build(self) -> AttentionBackend:
        """Build the backend; imports its libraries."""
        backend: AttentionBackend = load(self.target)()
        return backend


BACKENDS: dict[str, BackendFacts] = {
    "torch": BackendFacts(
        "aerie.attention.backends.torch_backend:TorchBackend", torch_refusal, layouts=ALL_LAYOUTS, scores=ALL_SCORES
    ),
    "triton": BackendFacts(
        "aerie.attention.backends.triton_backend:TritonBackend",
        triton_refusal,
        layouts=ALL_LAYOUTS,
        chunks_on_device=True,
        scores=ALL_SCORES,
        package="triton",
    ),
    "flashinfer": BackendFacts(
        "aerie.attention.backends.flashinfer_backend:FlashInferBackend",
        flashinfer_refusal,
        layouts=ALL_LAYOUTS,
        package="flashinfer",
    ),
    "trtllm": BackendFacts(
        "aerie.attention.backends.trtllm_backend:TrtllmBackend",
        trtllm_refusal,
        DECODE_MODES,
        ALL_LAYOUTS,
        package="flashinfer",
    ),
}
assert tuple(BACKENDS) == BACKEND_NAMES
assert {name for name, facts in BACKENDS.items() if Mode.PREFILL not in facts.modes} == ROUNDS_ONLY


@dataclass(frozen=True)
class Choice:
    """A configured backend: `field`, such as "attention.decode", names the backend for `use`."""

    field: str
    name: str
    use: AttentionUse


def choose_backends(choices: Iterable[Choice]) -> dict[Mode, AttentionBackend]:
    """Return a backend per mode, one object per name. Raises ValueError as `check_choices` does."""
    made: dict[str, AttentionBackend] = {}
    chosen = {}
    for choice, name in check_choices(choices):
        if name not in made:
            made[name] = BACKENDS[name].build()
        chosen[choice.use.mode] = made[name]
    return chosen


def check_choices(choices: Iterable[Choice], here: bool = True) -> list[tuple[Choice, str]]:
    """Return each choice and the name of its backend: "auto" is triton on a GPU, torch on a CPU. Imports no kernel
    library.
    here: whether this machine will run them; then packages must be installed.

    Raises ValueError, with field, reason and alternatives, for a backend that does not exist or does not support its
    use.
    """
    named = []
    for choice in choices:
        name = choice.name
        if name == "auto":
            name = next(backend for backend, needs in AUTO if needs(choice.use.device))
        reason = refusal(name, choice.use, here)
        if reason is not None:
            able = [other for other in BACKENDS if refusal(other, choice.use, here) is None]
            raise ValueError(
                f"{choice.field}={choice.name}: {name} cannot serve {choice.use.mode.value}: {reason}; "
                f"{'those that can: ' + ', '.join(able) if able else 'no backend can'}"
            )
        named.append((choice, name))
    return named


def refusal(name: str, use: AttentionUse, here: bool = True) -> str | None:
    """Return why backend `name` does not support `use`; None if it does. here: see `check_choices`."""
    if name not in BACKENDS:
        return "there is no such backend"
    facts = BACKENDS[name]
    reason = limit(facts, use)
    if here and reason is None and facts.package is not None and not is_installed(facts.package):
        return f"the package {facts.package} is not installed: {install_command('cuda')}"
    return reason


def limit(facts: BackendFacts, use: AttentionUse) -> str | None:
    """Do `refusal` regardless of installed packages. For a GPU of unknown capability: refuse only what no GPU
    supports."""
    possible = use.device.possible()
    if len(possible) > 1:
        reasons = [limit(facts, dataclasses.replace(use, device=device)) for device in possible]
        return None if None in reasons else reasons[-1]
    if use.mode not in facts.modes:
        return _mode_refusal(facts)
    if use.layout not in facts.layouts:
        return f"it reads KV kept as {', '.join(sorted(facts.layouts))}, not as {use.layout}"
    if use.window is not None and "window" not in facts.scores:
        return f"speculative.window={use.window}: it attends to the whole context"
    return score_refusal(use.scores, facts.scores) or facts.refusal(use)


def build_backend(name: str, mode: Mode) -> AttentionBackend:
    """Return the backend `name`. Raises ValueError, with alternatives, if it does not exist or never supports
    `mode`."""
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r}: does not exist; choose one of {', '.join(sorted(BACKENDS))}")
    facts = BACKENDS[name]
    if mode not in facts.modes:
        raise ValueError(f"attention backend {name!r}: cannot do {mode.value}; {_mode_refusal(facts)}")
    return facts.build()


def deterministic_backend() -> AttentionBackend:
    """Return the triton backend whose results depend only on a row's own path
    (`aerie.attention.backends.triton_backend`)."""
    backend: AttentionBackend = load("aerie.attention.backends.triton_backend:deterministic")()
    return backend


def _mode_refusal(facts: BackendFacts) -> str:
    return f"it does {', '.join(sorted(mode.value for mode in facts.modes))} only"


def needs_cpu_seq_lens(name: str, mode: Mode) -> bool:
    """Return whether backend `name` reads a batch's lengths on the host in `mode`, which syncs with the GPU and cannot
    be captured."""
    return mode in BACKENDS[name].cpu_seq_lens_modes
