"""Builds the `CostTable` from measured times. Pure; used by `cost_probe`."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from aerie.workers.runner.costs.cost_points import Point, ProbeExtent
from aerie.workers.scheduling.cost_table import CostTable, RoundCosts


def table_of(found: Mapping[Point, float], extent: ProbeExtent) -> CostTable:
    """Return the table of measured milliseconds. Times in it never decrease with more work: if a measured time does,
    the larger time is used for both. found: includes all required points."""
    shapes, default = extent.shapes, extent.shapes.default
    reads = [_kv_costs(found, shape) or _kv_costs(found, default) or {1: 0.0} for shape in range(len(shapes))]
    rounds = tuple(_round_costs(found, shape, reads[shape]) for shape in range(len(shapes)))
    alone = _chunks_alone(found, extent.max_step_tokens)
    requests = sorted({p.num_requests for p in found if p.chunk_tokens})
    if extent.max_running not in requests:
        requests = [0]  # otherwise larger numbers would be extrapolated from two adjacent points
    beside = [shapes.largest_beside_chunks(n) for n in requests]
    rows = [_chunk_row(found, shape, n, alone) for shape, n in zip(beside, requests, strict=True)]
    padded = extent.next_to_last + 1
    if extent.token_buckets and requests[-1] > padded > requests[-2]:
        requests.insert(-1, padded)  # larger captured steps are padded to the maximum
        rows.insert(-1, rows[-1])
        beside.insert(-1, beside[-1])
    at, source = _steps(sorted(alone), extent.token_buckets)
    return CostTable(
        rounds=rounds,
        chunk_requests=tuple(requests),
        chunk_tokens=tuple(at),
        chunk_ms=tuple(tuple(row[i] for i in source) for row in rows),
        default=default,
        ms_per_chunk_kv=_chunk_kv_cost(found, alone),
        beside=tuple(beside),
    )


def _round_costs(found: Mapping[Point, float], shape: int, reads: Mapping[int, float]) -> RoundCosts:
    ms = {p.num_requests: ms for p, ms in found.items() if p == Point(shape, p.num_requests) and p.num_requests}
    sizes = sorted(ms)
    per_token = np.interp(sizes, sorted(reads), [reads[n] for n in sorted(reads)]).tolist()
    return RoundCosts(tuple(sizes), tuple(accumulate((ms[n] for n in sizes), max)), tuple(per_token))


def _kv_costs(found: Mapping[Point, float], shape: int) -> dict[int, float]:
    """Return the milliseconds that each KV token adds to a round, by batch size."""
    return {
        p.num_requests: max(0.0, ms - found[Point(shape, p.num_requests)]) / (p.num_requests * p.context)
        for p, ms in found.items()
        if p.shape == shape and p.context and not p.chunk_tokens and Point(shape, p.num_requests) in found
    }


def _chunks_alone(found: Mapping[Point, float], max_step_tokens: int) -> dict[int, float]:
    """Return the milliseconds of steps without rounds, by prompt tokens. Those of `max_step_tokens` are extrapolated
    from the last two if they were not measured."""
    alone = {p.chunk_tokens: ms for p, ms in found.items() if p.num_requests == 0 and p.context == 0}
    last = max(alone)
    if last < max_step_tokens:
        before = max((t for t in alone if t < last), default=0)
        per_token = max(0.0, alone[last] - alone.get(before, 0.0)) / (last - before)
        alone[max_step_tokens] = alone[last] + per_token * (max_step_tokens - last)
    return alone


def _chunk_row(
    found: Mapping[Point, float], shape: int, num_requests: int, alone: Mapping[int, float]
) -> tuple[float, ...]:
    """Return the milliseconds of mixed batches with rounds of `num_requests`, for the chunk sizes in `alone`. The
    difference between an unmeasured size and the nearest smaller one is taken from steps without rounds."""
    known = {t: found[p] for t in alone if (p := Point(shape, num_requests, t)) in found}
    row = []
    for tokens in sorted(alone):
        near = max((t for t in known if t <= tokens), default=min(known))
        row.append(known[near] + alone[tokens] - alone[near])
    return tuple(accumulate(row, max))


def _steps(tokens: Sequence[int], buckets: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the table's chunk sizes, and for each the index in `tokens` of the size with the same cost: a chunk costs
    as much as the bucket to which it is padded."""
    at, source = list(tokens[:1]), [0]
    for index, (smaller, size) in enumerate(zip(tokens, tokens[1:], strict=False), 1):
        if size in buckets and smaller + 1 < size:
            at.append(smaller + 1)
            source.append(index)
        at.append(size)
        source.append(index)
    return at, source


def _chunk_kv_cost(found: Mapping[Point, float], alone: Mapping[int, float]) -> float:
    """Return the milliseconds per (token of a chunk, token before the chunk); 0 if not measured."""
    costs = [
        max(0.0, ms - alone[p.chunk_tokens]) / (p.chunk_tokens * p.context)
        for p, ms in found.items()
        if p.chunk_tokens and p.context
    ]
    return max(costs, default=0.0)
