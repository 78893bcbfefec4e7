"""Messages of commands: one `Command` to all ranks, and one `CommandAnswer` from each rank.

A command is carried out between two steps, at the same place in the order of plans on every rank. Encoded as plans are
(`aerie.workers.scheduling.plan`). How to add a kind: docs/add-a-command.md.
"""

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from aerie.workers.scheduling.plan import GraphCount


class CaptureGraph(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Capture the next waiting CUDA graph. Does nothing if none waits. From `CapturePacing`. -> `GraphedDecoding`

    extra_s: seconds beyond `engine.step_timeout_s` after which a rank that carries it out counts as hung.
    """

    extra_s: ClassVar[float] = 0.0


class Captured(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The result of `CaptureGraph`. graphs: graph counts after it."""

    graphs: GraphCount


class Folder(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A checkpoint folder with safetensors files, which every rank can read. Its config.json is not read."""

    path: str


class NamedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A whole tensor. name: its name in checkpoints. dtype: such as "bfloat16". data: contiguous, little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Tensors(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Tensors in the message itself."""

    tensors: tuple[NamedTensor, ...]


class Staged(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Tensors that a trainer has sent in the open session (`WeightTransfer`)."""


WeightSource = Folder | Tensors | Staged


class LoadWeights(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Load weights again, into the memory that they have. Sent by `WeightVersions`. -> `WeightUpdate`

    target, draft: sources of the models' weights; None keeps them. Names that a source lacks keep their weights.
    version: its name for clients; "": the number of the update.
    is_learned: the draft has learned from this engine's own texts. No text depends on it, so that the engine's version
        and its cached pages stay.
    """

    extra_s: ClassVar[float] = 600.0

    target: WeightSource | None = None
    draft: WeightSource | None = None
    version: str = ""
    is_learned: bool = False

    @property
    def sources(self) -> dict[str, WeightSource]:
        """The sources by model, "target" first."""
        sources = {"target": self.target, "draft": self.draft}
        return {model: source for model, source in sources.items() if source is not None}


class LoadedWeights(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The result of `LoadWeights`.

    missing: for each model of the command, the names that its source lacks.
    took_s: seconds in which steps waited on this rank.
    """

    missing: dict[str, tuple[str, ...]]
    took_s: float = 0.0


class OpenTransfer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Join a trainer's group, in the background; ends an earlier one. -> `WeightTransfer`

    address, port: address of the trainer's store; "" and 0 with `unique_id`.
    rank: in the group, of the engine's rank 0; the trainer is rank 0 of the group.
    size: number of ranks in the group.
    packed, buffer_bytes: defaults of `ReceiveWeights`.
    timeout_s: limit for joining, and for each broadcast.
    unique_id: NCCL's; b"": the store has it.
    """

    extra_s: ClassVar[float] = 0.0

    address: str
    port: int
    rank: int
    size: int
    packed: bool
    buffer_bytes: int
    timeout_s: float
    unique_id: bytes = b""


class StartUpdate(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Open a session. model: "target" or "draft". -> `WeightTransfer`"""

    extra_s: ClassVar[float] = 0.0

    model: str


class ReceiveWeights(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Receive tensors beside the steps that follow. -> `WeightTransfer`

    names, dtypes, shapes: those of whole tensors, in the order in which they are sent; all empty: those of the last
        time.
    packed: None: as the group was opened.
    """

    extra_s: ClassVar[float] = 0.0

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    packed: bool | None = None


class CloseTransfer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End group and session; received tensors are dropped. -> `WeightTransfer`"""

    extra_s: ClassVar[float] = 0.0


class InspectTransfer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Change nothing. -> `WeightTransfer`"""

    extra_s: ClassVar[float] = 0.0


class TransferState(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The result of the commands of a transfer.

    is_busy: the rank joins or receives in the background.
    error: why the last such work failed; it has ended group and session.
    session: the model of the open session; "": none.
    staged: the models of which tensors are there.
    uncovered: the models' names of which no tensor has come, by model.
    num_bytes: received in this session.
    """

    is_busy: bool
    error: str = ""
    session: str = ""
    staged: tuple[str, ...] = ()
    uncovered: dict[str, tuple[str, ...]] = {}
    num_bytes: int = 0


class LoadAdapter(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Start to read an adapter to host memory, beside the steps that follow. From `Adapters`. -> `RankAdapters`

    number: the adapter's number from now on.
    path: its folder, which every rank can read.
    """

    extra_s: ClassVar[float] = 0.0

    number: int
    path: str


class InspectAdapters(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Report which of these adapters have been read. From `Adapters`. -> `RankAdapters`"""

    extra_s: ClassVar[float] = 0.0

    numbers: tuple[int, ...]


class UnloadAdapter(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Free the memory of an adapter, which no request has. From `Adapters`. -> `RankAdapters`"""

    extra_s: ClassVar[float] = 0.0

    number: int


class AdapterReads(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The result of the commands of adapters. ended: by number of each adapter that is no longer being read: why this
    rank refuses it, or ""."""

    ended: dict[int, str] = {}


class SumWeights(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Sum the weights. -> `WeightChecker`"""

    extra_s: ClassVar[float] = 600.0


class WeightSums(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The result of `SumWeights`. sums: a checksum of each of the rank's tensors, by model and name."""

    sums: dict[str, str]


class ReadRoutedExperts(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Read the experts that routers chose for the tokens of requests that have ended. -> `ExpertRecord`

    pages: page ids of each request, in order. No plan may have been made since they were freed.
    num_tokens: tokens with KV of each request.
    """

    extra_s: ClassVar[float] = 10.0

    pages: tuple[tuple[int, ...], ...]
    num_tokens: tuple[int, ...]


class RoutedExperts(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The result of `ReadRoutedExperts`, of rank 0; other ranks return none. files: of each request, an .npy file with
    an array [tokens, layers, experts of a token] of uint8, or of uint16 with more than 256 experts. Layers without
    experts have zeros."""

    files: tuple[bytes, ...] = ()


class ReleasePages(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Give the memory of all KV pages back. No request may run until `RestorePages`. -> `Worker`"""

    extra_s: ClassVar[float] = 60.0


class RestorePages(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Take the memory of all KV pages again, at the same addresses; they are empty. -> `Worker`"""

    extra_s: ClassVar[float] = 60.0


class ReleasedPages(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The result of `ReleasePages` and `RestorePages`. num_bytes: given back on this rank."""

    num_bytes: int = 0


Transfer = OpenTransfer | StartUpdate | ReceiveWeights | CloseTransfer | InspectTransfer
PagesWork = ReleasePages | RestorePages | ReadRoutedExperts
Work = CaptureGraph | LoadWeights | Transfer | SumWeights | LoadAdapter | InspectAdapters | UnloadAdapter | PagesWork
Result = Captured | LoadedWeights | TransferState | WeightSums | AdapterReads | ReleasedPages | RoutedExperts


class Command(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Work for all ranks between plan `step` - 1 and plan `step` + 1. No step is in flight meanwhile.

    epoch, step: as in `StepPlan`: commands and plans are numbered together. Identify the command.
    """

    epoch: int
    step: int
    work: Work


class CommandAnswer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A rank's answer to a command.

    epoch, step: those of the command.
    rank: -1: no rank has answered, because the ranks were lost.
    result: None if the command failed.
    error: why it failed on this rank, which serves on as if the command had not come; else "".
    """

    epoch: int
    step: int
    rank: int
    result: Result | None = None
    error: str = ""


def first_error(answers: Sequence[CommandAnswer]) -> str:
    """Return the first error among `answers`, with its rank if there are several; "" if the command succeeded."""
    for answer in answers:
        if answer.error:
            return f"rank {answer.rank}: {answer.error}" if len(answers) > 1 else answer.error
    return ""
