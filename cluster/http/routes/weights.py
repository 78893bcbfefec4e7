"""Routes of vLLM that change the weights of running engines, and pause them meanwhile (docs/weight-updates.md). They
exist only for API keys that administer the server."""

import base64
import binascii
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import Field
from starlette.requests import Request

from aerie.cluster.http.endpoint import Endpoint, command, get, post
from aerie.cluster.http.errors import conflict, invalid
from aerie.cluster.http.routes.administration import administer, errors_of
from aerie.cluster.http.schema.body import Schema
from aerie.cluster.http.schema.response import (
    AbortedReply,
    AwakeReply,
    CheckedWeights,
    DraftsReply,
    EngineWeights,
    LearnedDraft,
    PausedReply,
    PauseReply,
    SleepingReply,
    SleepReply,
    SleptEngine,
    WeightsReply,
    WorldSizeReply,
)
from aerie.cluster.http.serving import Edge
from aerie.cluster.transport.admin import (
    AbortRequests,
    AdminCall,
    AdminOutcome,
    FinishUpdate,
    Inspect,
    InspectDrafts,
    JoinTrainer,
    Pause,
    PauseMode,
    Resume,
    RollBackDraft,
    Sleep,
    WakeUp,
)
from aerie.workers.scheduling.commands.command import (
    Folder,
    LoadWeights,
    OpenTransfer,
    ReceiveWeights,
    StartUpdate,
    SumWeights,
)

Path = Annotated[str, Field(min_length=1, max_length=4096)]


Name = Annotated[str, Field(min_length=1, max_length=1024)]
Size = Annotated[int, Field(ge=0, lt=2**40)]


class UpdateInfo(Schema):
    """path, draft_path: folders of the target's and the draft's weights, on the machines of the ranks.

    Or, within a session, tensors that the trainer sends: names, dtype_names and shapes, in the order in which they are
    sent; empty lists: those of the last time. packed: as in `TransferInfo`, if it differs.
    """

    path: Path | None = None
    draft_path: Path | None = None
    names: Annotated[list[Name], Field(max_length=1 << 20)] | None = None
    dtype_names: list[Name] = []
    shapes: list[Annotated[list[Size], Field(max_length=8)]] = []
    packed: bool | None = None


class UpdateWeightsRequest(Schema):
    """What to load."""

    update_info: UpdateInfo


class TransferInfo(Schema):
    """The trainer's group.

    master_address, master_port: address of its store; or nccl_unique_id_b64, NCCL's 128 bytes in base64.
    rank_offset: rank of the first engine's first rank; the trainer is rank 0.
    world_size: the trainer and all ranks of all engines.
    packed: tensors are joined to broadcasts of more than packed_buffer_size_bytes; else each has its own.
    packed_num_buffers: no effect on what is sent.
    timeout_s: limit for joining, and for each broadcast.
    """

    master_address: Annotated[str, Field(max_length=255)] = ""
    master_port: Annotated[int, Field(ge=0, lt=65536)] = 0
    nccl_unique_id_b64: Annotated[str, Field(max_length=200)] = ""
    rank_offset: Annotated[int, Field(ge=1, lt=1 << 16)] = 1
    world_size: Annotated[int, Field(ge=2, lt=1 << 16)]
    packed: bool = True
    packed_buffer_size_bytes: Annotated[int, Field(ge=1, le=1 << 34)] = 1 << 30
    packed_num_buffers: Annotated[int, Field(ge=1, le=64)] = 2
    timeout_s: Annotated[float, Field(gt=0, le=600)] = 120.0


class InitTransferRequest(Schema):
    """Which group to join."""

    init_info: TransferInfo


class CheckWeightsRequest(Schema):
    """action: checksum: answer the checksums; compare: with those of `baseline`, by engine, rank and name."""

    action: Literal["checksum", "compare"]
    baseline: dict[str, Any] | None = None


class FinishUpdateRequest(Schema):
    """weight_version: name of the new weights for clients; without one, the number of the update."""

    weight_version: Annotated[str, Field(max_length=256)] = ""


class RollBackRequest(Schema):
    """version: of `GET /draft/versions`."""

    version: Name


class AbortRequestsRequest(Schema):
    """request_ids: as the clients sent them: `X-Request-Id`, or `request_id` of the body."""

    request_ids: Annotated[list[Annotated[str, Field(max_length=128)]], Field(max_length=1 << 16)]


Ask = Callable[[Request, AdminCall], Awaitable[Sequence[AdminOutcome]]]


def endpoints(edge: Edge) -> list[Endpoint]:
    """Return the endpoints for one ingress."""

    ask = asking(edge)
    return [*_pausing(ask), *_drafting(ask), *_updating(ask)]


def asking(edge: Edge) -> Ask:
    """Return a function that lets every engine do what an administrator asks. It raises ApiError if one refuses."""

    async def ask(http: Request, call: AdminCall) -> Sequence[AdminOutcome]:
        outcomes = await administer(edge, http, call)
        if failed := errors_of(outcomes):
            raise conflict(failed)
        return outcomes

    return ask


def _pausing(ask: Ask) -> list[Endpoint]:
    """Return the endpoints that pause engines, and end requests."""

    async def pause(http: Request) -> PauseReply:
        """Runs no steps until /resume. `mode`: abort ends running requests, wait lets them end, keep keeps them where
        they are. New requests are refused, or queued with keep."""
        mode = http.query_params.get("mode", "abort")
        if mode not in get_args(PauseMode):
            raise invalid("mode", f"mode={mode}: must be one of {', '.join(get_args(PauseMode))}")
        await ask(http, Pause(mode))  # type: ignore[arg-type]
        return PauseReply("paused")

    async def resume(http: Request) -> PauseReply:
        """Ends a pause."""
        await ask(http, Resume())
        return PauseReply("resumed")

    async def is_paused(http: Request) -> PausedReply:
        """Whether engines are paused."""
        return PausedReply(any(outcome.is_paused for outcome in await ask(http, Inspect())))

    async def sleep(http: Request) -> SleepReply:
        """Pauses, and frees the memory of the KV cache until /wake_up. `level`: 1; weights stay in memory. `mode`:
        abort ends running requests, wait lets them end first."""
        level, mode = http.query_params.get("level", "1"), http.query_params.get("mode", "abort")
        if level != "1":
            raise invalid("level", f"level={level}: must be 1, which frees the KV cache; weights stay in memory")
        if mode not in ("abort", "wait"):
            raise invalid("mode", f"mode={mode}: must be abort or wait; requests cannot be kept without their KV")
        _check_tags(http, ("kv_cache",))
        outcomes = await ask(http, Sleep(mode))  # type: ignore[arg-type]
        return SleepReply([SleptEngine(outcome.engine_id, outcome.num_bytes) for outcome in outcomes])

    async def wake_up(http: Request) -> AwakeReply:
        """Takes the memory of the KV cache again, and ends the pause. `tags`: weights alone changes nothing."""
        if _check_tags(http, ("weights", "kv_cache")) == {"weights"}:
            is_asleep = any(outcome.is_sleeping for outcome in await ask(http, Inspect()))
            return AwakeReply("sleeping" if is_asleep else "awake")
        await ask(http, WakeUp())
        return AwakeReply("awake")

    async def is_sleeping(http: Request) -> SleepingReply:
        """Whether engines sleep."""
        return SleepingReply(any(outcome.is_sleeping for outcome in await ask(http, Inspect())))

    async def abort_requests(http: Request, body: AbortRequestsRequest) -> AbortedReply:
        """Ends requests of any client by their ids. Unknown ids have no effect."""
        outcomes = await ask(http, AbortRequests(tuple(body.request_ids)))
        return AbortedReply(sum(outcome.num_aborted for outcome in outcomes))

    return [
        command("/pause", pause, PauseReply, True),
        command("/resume", resume, PauseReply, True),
        get("/is_paused", is_paused, PausedReply),
        command("/sleep", sleep, SleepReply, True),
        command("/wake_up", wake_up, AwakeReply, True),
        get("/is_sleeping", is_sleeping, SleepingReply),
        post("/abort_requests", abort_requests, AbortRequestsRequest, AbortedReply),
    ]


def _drafting(ask: Ask) -> list[Endpoint]:
    """Return the endpoints for drafts that learn."""

    async def draft_versions(http: Request) -> DraftsReply:
        """The drafts that engines have learned."""
        return _drafts(await ask(http, InspectDrafts()))

    async def roll_back(http: Request, body: RollBackRequest) -> DraftsReply:
        """Goes back to an earlier draft of every engine."""
        return _drafts(await ask(http, RollBackDraft(body.version)))

    return [
        get("/draft/versions", draft_versions, DraftsReply),
        post("/draft/rollback", roll_back, RollBackRequest, DraftsReply),
    ]


def _updating(ask: Ask) -> list[Endpoint]:
    """Return the endpoints that load weights, from folders or from a trainer."""

    async def update_weights(http: Request, body: UpdateWeightsRequest) -> WeightsReply:
        """Loads weights from folders that every rank can read, between two steps of every engine; running requests
        continue with them. Or, within a session, receives tensors from the trainer, beside the steps."""
        return weights_reply(await ask(http, loads_of(body.update_info)))

    async def weight_info(http: Request) -> WeightsReply:
        """The number of each engine's weights."""
        return weights_reply(await ask(http, Inspect()))

    async def init_transfer(http: Request, body: InitTransferRequest) -> WeightsReply:
        """Joins the trainer's group with the ranks of all engines; call it while the trainer joins. Ends an earlier
        group and its session."""
        engines = sorted(await ask(http, Inspect()), key=lambda outcome: outcome.engine_id)
        return weights_reply(await ask(http, _join(body.init_info, engines)))

    async def start_update(http: Request) -> WeightsReply:
        """Opens a session for weights of the target; names that begin with `draft.` are the draft's."""
        return weights_reply(await ask(http, StartUpdate("target")))

    async def start_draft_update(http: Request) -> WeightsReply:
        """Opens a session for weights of the draft."""
        return weights_reply(await ask(http, StartUpdate("draft")))

    async def finish_update(http: Request, body: FinishUpdateRequest) -> WeightsReply:
        """Switches to the session's weights, between two steps of every engine, and answers the names that were not
        covered."""
        return weights_reply(await ask(http, FinishUpdate(body.weight_version)))

    async def check_weights(http: Request, body: CheckWeightsRequest) -> CheckedWeights:
        """Checksums of every rank's weights, or what differs from earlier ones."""
        sums = {outcome.engine_id: list(outcome.sums) for outcome in await ask(http, SumWeights())}
        if body.action == "checksum":
            return CheckedWeights(sums)
        if body.baseline is None:
            raise invalid("baseline", "baseline: give the checksums of an earlier reply")
        before, after = _named_sums(body.baseline), _named_sums(sums)
        return CheckedWeights(sums, sorted(n for n in before | after if before.get(n) != after.get(n)))

    async def world_size(http: Request) -> WorldSizeReply:
        """Number of ranks of all engines."""
        return WorldSizeReply(sum(outcome.num_ranks for outcome in await ask(http, Inspect())))

    return [
        post("/update_weights", update_weights, UpdateWeightsRequest, WeightsReply),
        get("/weight_info", weight_info, WeightsReply),
        post("/init_weight_transfer_engine", init_transfer, InitTransferRequest, WeightsReply),
        command("/start_weight_update", start_update, WeightsReply, True),
        command("/start_draft_weight_update", start_draft_update, WeightsReply, True),
        post("/finish_weight_update", finish_update, FinishUpdateRequest, WeightsReply),
        post("/weight_checker", check_weights, CheckWeightsRequest, CheckedWeights),
        get("/get_world_size", world_size, WorldSizeReply),
    ]


def _drafts(outcomes: Sequence[AdminOutcome]) -> DraftsReply:
    return DraftsReply(
        {
            outcome.engine_id: [
                LearnedDraft(draft.name, draft.state, draft.gain, draft.low, draft.why) for draft in outcome.drafts
            ]
            for outcome in outcomes
        }
    )


def _check_tags(http: Request, known: tuple[str, ...]) -> set[str]:
    """Return `tags` of the query, as vLLM's clients repeat it and others separate it by commas; none: all. Raises
    ApiError."""
    tags = {tag for text in http.query_params.getlist("tags") for tag in text.split(",")} or set(known)
    if unknown := sorted(tags - set(known)):
        raise invalid("tags", f"tags={unknown[0]}: must be one of {', '.join(known)}")
    return tags


def loads_of(info: UpdateInfo) -> LoadWeights | ReceiveWeights:
    """Return what engines do. Raises ApiError."""
    folders = [None if path is None else Folder(path) for path in (info.path, info.draft_path)]
    if info.names is None:
        if folders == [None, None]:
            raise invalid("update_info", "update_info: give path, draft_path, or both; or names in a session")
        return LoadWeights(folders[0], folders[1])
    if folders != [None, None]:
        raise invalid("update_info", "update_info: give folders or names, not both")
    if not len(info.names) == len(info.dtype_names) == len(info.shapes):
        raise invalid("update_info", "update_info: names, dtype_names and shapes must have the same length")
    shapes = tuple(tuple(shape) for shape in info.shapes)
    return ReceiveWeights(tuple(info.names), tuple(info.dtype_names), shapes, info.packed)


def _join(info: TransferInfo, engines: Sequence[AdminOutcome]) -> JoinTrainer:
    """Return the call that gives each engine its ranks. engines: sorted. Raises ApiError."""
    first_ranks, rank = dict[str, int](), info.rank_offset
    for engine in engines:
        first_ranks[engine.engine_id] = rank
        rank += engine.num_ranks
    if rank != info.world_size:
        raise invalid(
            "init_info.world_size",
            f"world_size={info.world_size}: must be {rank}: rank_offset={info.rank_offset} and the engines' ranks "
            "(/get_world_size)",
        )
    if bool(info.nccl_unique_id_b64) == bool(info.master_address and info.master_port):
        raise invalid("init_info", "init_info: give master_address and master_port, or nccl_unique_id_b64")
    try:
        unique_id = base64.b64decode(info.nccl_unique_id_b64, validate=True)
    except binascii.Error:
        unique_id = b"?"
    if len(unique_id) not in (0, 128):
        raise invalid("init_info.nccl_unique_id_b64", "nccl_unique_id_b64: must be the base64 of 128 bytes")
    opened = OpenTransfer(
        info.master_address,
        info.master_port,
        rank=info.rank_offset,
        size=info.world_size,
        packed=info.packed,
        buffer_bytes=info.packed_buffer_size_bytes,
        timeout_s=info.timeout_s,
        unique_id=unique_id,
    )
    return JoinTrainer(first_ranks, opened)


def _named_sums(sums: Mapping[str, Any]) -> dict[str, str]:
    """Return the checksums of a reply by "ENGINE.RANK.NAME". Raises ApiError for what is none."""
    try:
        return {
            f"{engine}.{rank}.{name}": str(value)
            for engine, ranks in sums.items()
            for rank, named in enumerate(ranks)
            for name, value in named.items()
        }
    except (AttributeError, TypeError):
        raise invalid("baseline", "baseline: must be `checksums` of an earlier reply") from None


def weights_reply(outcomes: Sequence[AdminOutcome]) -> WeightsReply:
    return WeightsReply(
        [
            EngineWeights(
                outcome.engine_id,
                outcome.weight_epoch,
                weight_version=outcome.version,
                missing=outcome.missing,
                took_s=outcome.took_s,
                draft_fault=outcome.draft_fault,
                fault=outcome.fault,
            )
            for outcome in outcomes
        ]
    )
