"""What an attention backend is, the table of those that exist, and how the configured ones are chosen.

A backend prepares a batch once per forward pass (`prepare`) and is then called once per layer (`forward`). It never
allocates per layer what it could prepare, and states in which modes it must know lengths on the host.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

import torch
from torch import Tensor

from attention.kv_cache.pool import LayerKV
from attention.limits import AttentionUse, flashinfer_refusal, torch_refusal, triton_refusal, trtllm_refusal
from attention.metadata import DecodeBatch, Mode, PrefillBatch

ALL_MODES = frozenset(Mode)
DECODE_MODES = ALL_MODES - {Mode.PREFILL}


class Prepared(ABC):
    """One batch, ready to be attended layer by layer.

    For each layer `plan` may be called, then the layer's KV is stored, then `forward` is called.
    """

    def plan(self, q: Tensor, kv: LayerKV, scale: float) -> None:  # noqa: B027  many have nothing to launch
        """Launch what `forward` reads beside q and KV, as far as it hangs on shapes that only layers know.

        Called with the arguments of `forward`, of whose tensors no value is read, before the layer's KV is stored: the
        store then stands between what is launched here and a `forward` that is launched early. Without this call
        `forward` does it, and is not launched early. Does nothing where all is there already.
        """

    @abstractmethod
    def forward(self, q: Tensor, kv: LayerKV, scale: float) -> Tensor:
        """Attention of rows q [rows, q_heads, head_dim] over `kv`, whose rows of this pass are already written.

        scale: the factor on q . k before the softmax. Returns [rows, q_heads, head_dim] in q's dtype.
        """


class AttentionBackend(ABC):
    """name: as in the configuration and in `BACKENDS`, which holds the facts about it."""

    name: ClassVar[str]

    @abstractmethod
    def prepare(self, batch: DecodeBatch | PrefillBatch) -> Prepared:
        """What `forward` needs of a batch; the batch's tensors are read, not kept longer than the pass."""

    def verify_buffer(self, num_requests: int, rows: int, device: torch.device) -> Tensor | None:
        """The memory from which this backend reads the masks of trees of `rows` nodes, for whoever reads the trees to
        fill: [num_requests, rows, words] uint16, words even, bit j of word w of a row says whether it sees tail column
        16 w + j. It lives on, where it is. None: `DecodeBatch.mask` is all that it reads."""
        return None

    def needs_cpu_seq_lens(self, mode: Mode) -> bool:
        """Whether `prepare` reads a batch's lengths on the host, which waits for the GPU and cannot be captured."""
        return mode in BACKENDS[self.name].cpu_seq_lens_modes


@dataclass(frozen=True)
class BackendFacts:
    """One row of the table. build: makes the backend, importing its libraries. refusal: why it cannot serve a use in
    one of its `modes`, None if it can. cpu_seq_lens_modes: see `AttentionBackend.needs_cpu_seq_lens`; prompt chunks are
    never among them, their lengths come with the plan. package: what it imports beyond torch, of the extra `cuda`."""

    build: Callable[[], AttentionBackend]
    refusal: Callable[[AttentionUse], str | None]
    modes: frozenset[Mode] = ALL_MODES
    cpu_seq_lens_modes: frozenset[Mode] = frozenset()
    package: str | None = None


def _torch() -> AttentionBackend:
    from attention.backends.torch_backend import TorchBackend

    return TorchBackend()


def _triton() -> AttentionBackend:
    from attention.backends.triton_backend import TritonBackend

    return TritonBackend()


def _flashinfer() -> AttentionBackend:
    from attention.backends.flashinfer_backend import FlashInferBackend

    return FlashInferBackend()


def _trtllm() -> AttentionBackend:
    from attention.backends.trtllm_backend import TrtllmBackend

    return TrtllmBackend()


BACKENDS: dict[str, BackendFacts] = {
    "torch": BackendFacts(_torch, torch_refusal),
    "triton": BackendFacts(_triton, triton_refusal, package="triton"),
    "flashinfer": BackendFacts(_flashinfer, flashinfer_refusal, package="flashinfer"),
    "trtllm": BackendFacts(_trtllm, trtllm_refusal, DECODE_MODES, package="flashinfer"),
}


@dataclass(frozen=True)
class Choice:
    """What the configuration says: `field`, such as "attention.decode", names the backend that serves `use`."""

    field: str
    name: str
    use: AttentionUse


def choose_backends(choices: Iterable[Choice]) -> dict[Mode, AttentionBackend]:
    """A backend per mode, one object per name. "auto" is triton on a GPU, torch on a CPU.

    Raises ValueError with field, reason and the backends that can, where one does not exist or cannot serve its use.
    """
    made: dict[str, AttentionBackend] = {}
    chosen = {}
    for choice in choices:
        name = choice.name
        if name == "auto":
            name = "triton" if choice.use.device == "cuda" else "torch"
        reason = refusal(name, choice.use)
        if reason is not None:
            able = [other for other in BACKENDS if refusal(other, choice.use) is None]
            raise ValueError(
                f"{choice.field}={choice.name}: {name} cannot serve {choice.use.mode.value}: {reason}; "
                f"{'those that can: ' + ', '.join(able) if able else 'no backend can'}"
            )
        if name not in made:
            made[name] = BACKENDS[name].build()
        chosen[choice.use.mode] = made[name]
    return chosen


def refusal(name: str, use: AttentionUse) -> str | None:
    """Why backend `name` cannot serve `use` in this process, None if it can."""
    if name not in BACKENDS:
        return "there is no such backend"
    facts = BACKENDS[name]
    reason = facts.refusal(use) if use.mode in facts.modes else _mode_refusal(facts)
    if reason is None and facts.package is not None and find_spec(facts.package) is None:
        return f"the package {facts.package} is not installed: pip install 'aerie[cuda]'"
    return reason


def build_backend(name: str, mode: Mode) -> AttentionBackend:
    """The backend `name`; raises ValueError with the ones that exist if there is none or it never does `mode`."""
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r}: does not exist; choose one of {', '.join(sorted(BACKENDS))}")
    facts = BACKENDS[name]
    if mode not in facts.modes:
        raise ValueError(f"attention backend {name!r}: cannot do {mode.value}; {_mode_refusal(facts)}")
    return facts.build()


def _mode_refusal(facts: BackendFacts) -> str:
    return f"it does {', '.join(sorted(mode.value for mode in facts.modes))} only"


def assert_not_captured(name: str, device: torch.device) -> None:
    """For a backend about to make what captured graphs will hold: raises RuntimeError under capture, whose memory is
    the graph's own."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"attention backend {name!r}: a new shape under capture; run it once before that")
