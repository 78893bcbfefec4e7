"""What administrators ask of an engine, and its answer: msgpack in calls of Ray actors.

Sent by `aerie.cluster.ingress.deployment`, carried out by `aerie.cluster.coordinator.coordinator`.
"""

from typing import Literal

import msgspec

from aerie.workers.scheduling.commands.command import LoadWeights, OpenTransfer, ReceiveWeights, StartUpdate, SumWeights

PauseMode = Literal["abort", "wait", "keep"]


class Pause(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Run no steps until `Resume`.

    mode: "abort" and "wait" refuse new requests; "abort" ends the others, "wait" lets them end first. "keep" keeps them
        where they are, and queues new ones.
    """

    mode: PauseMode


class Resume(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End a pause."""


class Sleep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Pause as `Pause` does, and give the memory of the KV cache back until `WakeUp`. Weights stay.

    mode: what becomes of running requests; they cannot be kept.
    """

    mode: Literal["abort", "wait"] = "abort"


class WakeUp(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Take the memory of the KV cache again, and end the pause."""


class AbortRequests(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End requests. request_ids: their clients' (`Owner.request_id`); unknown ones may have ended."""

    request_ids: tuple[str, ...]


class InspectDrafts(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Return the drafts that the engine has learned."""


class RollBackDraft(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Go back to an earlier draft. version: its name; "0": the configured one."""

    version: str


class DraftVersion(msgspec.Struct, frozen=True):
    """A draft that has learned, or the configured one, whose name is "0".

    folder: its files.
    state: "served", "former", or "rolled back".
    gain, low: acceptance length relative to the draft before, minus 1, on held-out texts, and its lower bound.
    why: reason of a rollback.
    """

    name: str
    folder: str
    state: str = "served"
    gain: float = 0.0
    low: float = 0.0
    why: str = ""


class LoadLora(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Load a LoRA adapter. path: its folder on the machines of the ranks. in_place: whether an adapter of this name may
    be loaded already; requests that come later have the new one. stamp: see `AdapterChange`."""

    name: str
    path: str
    in_place: bool = False
    stamp: int = 0


class UnloadLora(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Let no new request have a LoRA adapter. stamp: see `AdapterChange`."""

    name: str
    stamp: int = 0


class Inspect(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Change nothing."""


class JoinTrainer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Join a trainer's group. first_ranks: in the group, of each engine's rank 0, by engine id. opened: the rest."""

    first_ranks: dict[str, int]
    opened: OpenTransfer


class FinishUpdate(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Switch to the weights of the open session. version: their name for clients; "": the number of the update."""

    version: str = ""


TransferCall = JoinTrainer | StartUpdate | ReceiveWeights | FinishUpdate
PauseCall = Pause | Resume | Sleep | WakeUp | AbortRequests
DraftCall = InspectDrafts | RollBackDraft
AdminCall = (
    PauseCall | DraftCall | Inspect | LoadWeights | TransferCall | SumWeights | LoadLora | UnloadLora
)  # what an administrator may ask of an engine


class AdminOutcome(msgspec.Struct, frozen=True):
    """An engine after an `AdminCall`.

    weight_epoch: number of its weights (`aerie.workers.scheduling.commands.command_queue`).
    version: the name of its weights for clients.
    num_ranks: its attached ranks.
    missing: after `LoadWeights` and `FinishUpdate`, the names that each model's source lacks.
    took_s: seconds in which its steps waited for these calls.
    error: why the call failed, or "".
    is_sleeping: whether its KV cache has no memory.
    num_bytes: after `Sleep`, those that its ranks have given back.
    num_aborted: after `AbortRequests`.
    drafts: after calls of drafts, oldest first.
    sums: after `SumWeights`, each rank's checksums (`WeightSums`).
    draft_fault: why the draft counts as dead since an update (`DraftCheck`), or "".
    fault: why the engine did not answer, or why its weights are not those of the last update.
    """

    engine_id: str
    is_paused: bool = False
    weight_epoch: int = 0
    missing: dict[str, tuple[str, ...]] = {}
    version: str = ""
    num_ranks: int = 0
    took_s: float = 0.0
    error: str = ""
    fault: str = ""
    draft_fault: str = ""
    sums: tuple[dict[str, str], ...] = ()
    is_sleeping: bool = False
    num_bytes: int = 0
    num_aborted: int = 0
    drafts: tuple[DraftVersion, ...] = ()
