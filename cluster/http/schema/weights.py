"""Bodies of the routes for weights."""

from typing import Annotated, Any, Literal

from pydantic import Field

from aerie.cluster.http.schema.body import Schema

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

    master_address, master_port: of its store; or nccl_unique_id_b64, NCCL's 128 bytes in base64.
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
