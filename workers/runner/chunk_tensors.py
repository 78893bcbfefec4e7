"""Converts a plan's prompt chunks to tensors. Used by `aerie.workers.runner.plan_batch`."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aerie.kernels.kv.batches import ChunkLists, PrefillBatch, RowInputs
from aerie.workers.prompt_inputs import PromptInputs
from aerie.workers.runner.batch import PromptChunks, PromptTargets
from aerie.workers.scheduling.plan import Chunk, StepPlan, unpack_i32
from aerie.workers.vision.tower import VisionTower


def chunks_in_order(plan: StepPlan) -> list[Chunk]:
    """Return the plan's chunks in the order of their rows: those that end their prompt (next_token -1) first."""
    return sorted(plan.chunks, key=lambda chunk: chunk.next_token >= 0)


def chunk_columns(
    plan: StepPlan, has_states: bool = False, within_images: bool = False, num_axes: int = 1
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays that `prompt_chunks` and `prompt_targets` need on the device.

    has_states: see `prompt_chunks`.
    within_images: whether a layer's rule is `ScoreRule.within_images`.
    num_axes: rotary positions of a row, given for all rows if several.
    """
    chunks = chunks_in_order(plan)
    ids = [unpack_i32(chunk.tokens) for chunk in chunks]
    starts = np.array([chunk.start for chunk in chunks], np.int32)
    counts = np.array([len(tokens) for tokens in ids], np.int32)
    num_finals = sum(chunk.next_token < 0 for chunk in chunks)
    return (
        _target_columns(chunks, ids)
        | _input_columns(chunks, counts, num_axes)
        | (_reach_columns(chunks, counts) if within_images else {})
        | (_state_columns(plan, chunks) if has_states else {})
        | {
            "chunk ids": np.concatenate(ids).astype(np.int64),
            "chunk next ids": np.array([chunk.next_token for chunk in chunks], np.int64),
            "chunk slots": np.array([chunk.slot for chunk in chunks], np.int64),
            "chunk starts": starts,
            "chunk indptr": np.concatenate(([0], counts)).cumsum().astype(np.int32),
            "final lengths": (starts + counts - 1)[:num_finals],
        }
    )


def prompt_chunks(
    plan: StepPlan,
    columns: Mapping[str, Tensor],
    page_table: Tensor,
    has_states: bool = False,
    images: Tensor | None = None,
) -> PromptChunks:
    """Return the plan's chunks on the device.

    columns: includes those of `chunk_columns`.
    page_table: that of all slots, with the plan's changes.
    has_states: whether the model has recurrent layers.
    images: `image_values` of the plan.
    """
    chunks = chunks_in_order(plan)
    counts = tuple(len(chunk.tokens) // 4 for chunk in chunks)
    slots, final_lengths = columns["chunk slots"], columns["final lengths"]
    return PromptChunks(
        batch=PrefillBatch(
            qo_indptr=columns["chunk indptr"],
            starts=columns["chunk starts"],
            page_table=page_table[slots],
            num_rows=sum(counts),
            lists=ChunkLists(tuple(chunk.start for chunk in chunks), counts),
            store_from=columns["chunk kept from"] if has_states else None,
            slots=slots,
            saved_at=columns["chunk saved at"] if has_states else None,
            saved_row=columns["chunk saved rows"] if has_states else None,
            inputs=_inputs(columns, images),
        ),
        ids=columns["chunk ids"],
        next_ids=columns["chunk next ids"],
        final_slots=slots[: final_lengths.shape[0]],
        final_lengths=final_lengths,
    )


def _input_columns(chunks: list[Chunk], counts: npt.NDArray[np.int32], num_axes: int) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays that `_inputs` needs; empty unless a chunk has inputs or rows have several positions. counts:
    each chunk's number of rows."""
    columns: dict[str, npt.NDArray[Any]] = {}
    if num_axes == 1 and all(chunk.inputs is None for chunk in chunks):
        return columns
    rows, image_rows, embeddings, positions, first = [], [], [], [], 0
    inputs = [PromptInputs() if chunk.inputs is None else chunk.inputs for chunk in chunks]
    has_positions = num_axes > 1 or any(part.positions for part in inputs)
    num_axes = max(num_axes, *(part.num_axes for part in inputs))
    for chunk, chunk_inputs, count in zip(chunks, inputs, counts.tolist(), strict=True):
        before = first - chunk.start
        for part in chunk_inputs.embeddings:
            rows.append(np.arange(before + part.start, before + part.end, dtype=np.int64))
            embeddings.append(part.rows())
        for image in chunk_inputs.images:
            image_rows.append(np.arange(before + image.start, before + image.end, dtype=np.int64))
        own = chunk_inputs.axes if chunk_inputs.positions else np.arange(chunk.start, chunk.start + count)[None]
        positions.append(np.broadcast_to(own, (num_axes, count)))
        first += count
    if rows:
        columns |= {"embedded rows": np.concatenate(rows), "embeddings": np.concatenate(embeddings)}
    if image_rows:
        columns["image rows"] = np.concatenate(image_rows)
    if has_positions:
        whole = np.concatenate(positions, axis=1).astype(np.int64)
        columns["chunk positions"] = whole[0] if num_axes == 1 else whole
    return columns


def _reach_columns(chunks: list[Chunk], counts: npt.NDArray[np.int32]) -> dict[str, npt.NDArray[Any]]:
    """Return `RowInputs.reach`; empty without images."""
    if all(chunk.inputs is None or not chunk.inputs.images for chunk in chunks):
        return {}
    reaches = []
    for chunk, count in zip(chunks, counts.tolist(), strict=True):
        reach = np.arange(chunk.start, chunk.start + count, dtype=np.int32)
        for image in () if chunk.inputs is None else chunk.inputs.images:
            reach[image.start - chunk.start : image.end - chunk.start] = image.end - 1
        reaches.append(reach)
    return {"chunk reach": np.concatenate(reaches)}


def image_values(plan: StepPlan, tower: VisionTower | None) -> Tensor | None:
    """Return the rows of the plan's images in the order of `chunk_columns`; None without images."""
    if not any(chunk.inputs is not None and chunk.inputs.images for chunk in plan.chunks):
        return None
    assert tower is not None, "`PromptInputs.check` refuses images in engines without a tower"
    rows: dict[int, list[Tensor]] = {}
    for chunk in plan.chunks:  # in this order, as the scheduler counts them (`EncodedImages`)
        images = () if chunk.inputs is None else chunk.inputs.images
        rows[id(chunk)] = [tower.rows(image) for image in images]
    return torch.cat([part for chunk in chunks_in_order(plan) for part in rows[id(chunk)]])


def _inputs(columns: Mapping[str, Tensor], values: Tensor | None) -> RowInputs | None:
    """Return the rows' inputs besides token ids; None without any."""
    if "embedded rows" not in columns and "chunk positions" not in columns and values is None:
        return None
    return RowInputs(
        rows=columns.get("embedded rows"),
        embeddings=columns.get("embeddings"),
        positions=columns.get("chunk positions"),
        image_rows=columns.get("image rows"),
        image_values=values,
        reach=columns.get("chunk reach"),
    )


def _state_columns(plan: StepPlan, chunks: list[Chunk]) -> dict[str, npt.NDArray[Any]]:
    """Return each chunk's first position whose KV is written, and the position and row of its saved state."""
    saved = {slot: (position, row) for slot, position, row in unpack_i32(plan.saved_states).reshape(-1, 3).tolist()}
    at, rows = zip(*(saved.get(chunk.slot, (-1, 0)) for chunk in chunks), strict=True)
    return {
        "chunk kept from": np.array([chunk.store_from for chunk in chunks], np.int32),
        "chunk saved at": np.array(at, np.int32),
        "chunk saved rows": np.array(rows, np.int64),
    }


def _target_columns(chunks: list[Chunk], ids: list[npt.NDArray[np.int32]]) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays that `prompt_targets` needs. ids: each chunk's tokens."""
    if all(chunk.logprobs < 0 for chunk in chunks):
        return {}
    rows, tokens, first = [], [], 0
    for chunk, own in zip(chunks, ids, strict=True):
        count = chunk.num_logprobs
        rows.append(np.arange(first, first + count, dtype=np.int64))
        tokens.append(np.append(own[1:], chunk.next_token)[:count].astype(np.int64))
        first += len(own)
    return {"target rows": np.concatenate(rows), "target tokens": np.concatenate(tokens)}


def prompt_targets(plan: StepPlan, columns: Mapping[str, Tensor]) -> PromptTargets | None:
    num_top = max((chunk.logprobs for chunk in plan.chunks), default=-1)
    return PromptTargets(columns["target rows"], columns["target tokens"], num_top) if num_top >= 0 else None
