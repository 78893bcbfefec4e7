"""Rounds over latent rows by FlashInfer's kernel, whose plans are written by ours: a stand-in for the library attends,
in loops, as its kernel reads a plan. Under Triton's interpreter (TRITON_INTERPRET=1); with the library itself, on a
GPU, `test_backend_conformance` compares results."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the plans are written by a Triton kernel; triton is not installed here")

from aerie.attention.backends import flashinfer_latent  # noqa: E402
from aerie.attention.backends.torch_backend import TorchBackend  # noqa: E402
from aerie.attention.registry import build_backend  # noqa: E402
from aerie.kernels.attend.flashinfer_latent_plan_triton import (  # noqa: E402
    EXTENT_ARRAYS,
    MERGE_ARRAYS,
    PIECE_ARRAYS,
    TILE_TOKENS,
    LatentGrid,
    LatentPlanArrays,
    write_latent_plan,
)
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.kv.batches import Mode  # noqa: E402
from tests.support.kernels.attention_cases import (  # noqa: E402
    WORKS,
    Shape,
    Work,
    decode_batch,
    in_float64,
    num_pages,
    random_pool,
    random_rows,
)
from tests.support.kernels.triton_interpreter import INTERPRETED  # noqa: E402

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a GPU has the library itself")
CPU = torch.device("cpu")
PROGRAMS = 7
SHAPE = Shape(48, 20, 16, torch.float32, latent=32)  # 6 rows are two tiles of rows
ROUNDS = [work for work in WORKS if work.mode is not Mode.PREFILL]
WIDTH = 400  # pages of a row of the table
ARRAYS = (*PIECE_ARRAYS, *MERGE_ARRAYS, *EXTENT_ARRAYS, "work_indptr")


def read(grid: LatentGrid, ints: Tensor, info: list[int]) -> dict[str, list[int]]:
    """The arrays of a plan, as the kernel finds them."""
    assert info[0] == grid.cluster and info[1] == grid.clusters and len(info) == 18
    sizes = LatentPlanArrays(grid, CPU).sizes
    offsets = dict(zip(ARRAYS, info[2:16], strict=True))
    assert all(offset % 16 == 0 for offset in offsets.values())
    return {name: ints.view(torch.int32)[offsets[name] // 4 :][: sizes[name]].tolist() for name in ARRAYS}


class StandIn:
    """FlashInfer's compiled module of one type and one size of rows."""

    spoilt = False  # as another version would read plans

    def plan(self, floats: Tensor, ints: Tensor, staged: Tensor, *rest: Any) -> list[int]:
        """As the host plans one request: another cut, here none."""
        qo_indptr, kv_indptr, kv_len, heads, _, causal = rest
        grid = LatentGrid(1, int(qo_indptr[-1]), heads, PROGRAMS, causal)
        sizes = LatentPlanArrays(grid, CPU).sizes
        content = {name: [0] * size for name, size in sizes.items()}
        content["work_indptr"] = [0] + [grid.tiles] * grid.clusters
        for tile in range(grid.tiles):
            values = {"partial_indptr": -1, "q_len": grid.rows, "kv_len": int(kv_len[0]), "kv_end": int(kv_len[0])}
            values |= {"q_start": tile * 64 * grid.cluster}
            for name, value in values.items():
                content[name][tile] = value
        if self.spoilt:
            content["kv_end"][0] -= 1000
        begin, offsets = 0, []
        for name in ARRAYS:
            ints.view(torch.int32)[begin : begin + sizes[name]] = torch.tensor(content[name], dtype=torch.int32)
            offsets.append(4 * begin)
            begin += -(-sizes[name] // 4) * 4
        return [grid.cluster, grid.clusters, *offsets, 0, floats.numel() // 2]

    def run(self, floats: Tensor, ints: Tensor, info: list[int], *rest: Any) -> None:
        latent, rotated, values, keys, pages, out, lse, causal, heads, page_size, scale, natural, *scales = rest
        assert not natural and scales == [1.0, 1.0]
        count, width = latent.shape[0], latent.shape[2]
        partial = floats.view(torch.float32)[info[16] // 4 :]
        partial_lse = floats.view(torch.float32)[info[17] // 4 :]
        found = self._arrays(ints, info)
        q = torch.cat((latent, rotated), -1).reshape(count * heads, -1)
        out_rows, lse_rows = out.view(count * heads, width), None if lse is None else lse.view(-1)
        for cluster in range(info[1]):
            for piece in range(found["work_indptr"][cluster], found["work_indptr"][cluster + 1]):
                of = {name: found[name][piece] for name in (*PIECE_ARRAYS, *EXTENT_ARRAYS)}
                assert of["kv_start"] % TILE_TOKENS == 0
                end = min(of["q_start"] + 64 * info[0], of["q_len"] * heads)
                packed = torch.arange(of["q_start"], end)
                token = torch.arange(of["kv_start"], of["kv_end"])
                place = pages[of["kv_indptr"] + token // page_size].long(), token % page_size
                key = torch.cat((values[place], keys[place]), -1)
                mine = of["q_indptr"] * heads + packed
                scores = q[mine] @ key.T * scale * 1.4426950408889634
                if causal:
                    seen = of["kv_len"] - of["q_len"] + packed // heads
                    scores = scores.masked_fill(token > seen.unsqueeze(1), float("-inf"))
                total = torch.logsumexp(scores * 0.6931471805599453, -1) * 1.4426950408889634
                weights = torch.exp2(scores - total.unsqueeze(1)).nan_to_num(0.0)
                result = weights @ values[place]
                if of["partial_indptr"] < 0:
                    out_rows[mine] = result
                    if lse_rows is not None:
                        lse_rows[mine] = total
                else:
                    first = of["partial_indptr"]
                    partial[first * width : (first + len(packed)) * width] = result.flatten()
                    partial_lse[first : first + len(packed)] = total
        for merger in range(info[0] * info[1]):
            begin, end, low, high, stride = (found[name][merger] for name in MERGE_ARRAYS)
            for row in range(begin, end):
                assert 4 * width * high <= info[17] - info[16]
                places = torch.arange(low + row - begin, high, stride)
                each = partial[: high * width].view(high, width)[places]
                lses = partial_lse[places]
                out_rows[row] = torch.softmax(lses * 0.6931471805599453, 0) @ each
                if lse_rows is not None:
                    lse_rows[row] = torch.logsumexp(lses * 0.6931471805599453, 0) * 1.4426950408889634

    def _arrays(self, ints: Tensor, info: list[int]) -> dict[str, list[int]]:
        whole = ints.view(torch.int32)
        offsets = [*info[2:16], 4 * whole.numel()]
        sizes = {name: (offsets[i + 1] - offsets[i]) // 4 for i, name in enumerate(ARRAYS)}
        sizes["work_indptr"] = info[1] + 1
        return {name: whole[offsets[i] // 4 :][: sizes[name]].tolist() for i, name in enumerate(ARRAYS)}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr(flashinfer_latent, "_module", lambda dtype, kv: stand_in)
    monkeypatch.setattr(flashinfer_latent, "num_multiprocessors", lambda device: PROGRAMS)
    return stand_in


@pytest.mark.parametrize("work", ROUNDS, ids=lambda work: work.name)
def test_rounds_are_those_of_torch(work: Work, library: StandIn) -> None:
    torch.manual_seed(0)
    kv = random_pool(SHAPE, num_pages(SHAPE.page_size, work.suffix_len), CPU).layer(0)
    backend, scale = build_backend("flashinfer", work.mode), 0.2
    for lengths in ((1, 500, 63, 0), (0, 64, 340, 5)):  # the second finds the first one's plan
        batch = decode_batch(work, SHAPE, lengths, CPU)
        q = random_rows(batch.num_rows, SHAPE, CPU)
        expected = TorchBackend().prepare(batch).forward(q.double(), in_float64(kv), ScoreRule(scale))
        prepared = backend.prepare(batch)
        for _ in range(2):
            torch.testing.assert_close(
                prepared.forward(q, kv, ScoreRule(scale)).double(), expected, rtol=1e-4, atol=1e-5
            )


def test_another_version_is_refused(library: StandIn) -> None:
    library.spoilt = True
    work = ROUNDS[0]
    kv = random_pool(SHAPE, num_pages(SHAPE.page_size, 1), CPU).layer(0)
    batch = decode_batch(work, SHAPE, (3, 4), CPU)
    stand_in = SimpleNamespace(__version__="0.9.0")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match=r"flashinfer 0\.9\.0.*0\.6\.17"):
        patch.setitem(__import__("sys").modules, "flashinfer", stand_in)
        build_backend("flashinfer", work.mode).prepare(batch).forward(random_rows(2, SHAPE, CPU), kv, ScoreRule(0.2))


@pytest.mark.parametrize("lengths", [(0,), (1,), (5000,), (1, 17, 0, 200, 1021, 64, 65), (700,) * 5, (40,) * 20])
@pytest.mark.parametrize(("rows", "heads"), [(1, 16), (8, 16), (5, 30)])
@pytest.mark.parametrize("causal", [False, True])
def test_all_tokens_of_all_tiles_are_in_one_piece(
    lengths: tuple[int, ...], rows: int, heads: int, causal: bool
) -> None:
    grid = LatentGrid(len(lengths), rows, heads, PROGRAMS, causal)
    arrays = LatentPlanArrays(grid, CPU)
    arrays.ints.fill_(-7)  # what an earlier plan left
    write_latent_plan(arrays, torch.tensor(lengths, dtype=torch.int32), rows, WIDTH)
    found = read(grid, arrays.ints, arrays.plan_info(64))
    steps, seen, partial_rows = [0] * grid.clusters, dict[tuple[int, int], list[tuple[int, int]]](), dict[int, int]()
    assert found["work_indptr"][0] == 0 and found["work_indptr"] == sorted(found["work_indptr"])
    for cluster in range(grid.clusters):
        for piece in range(found["work_indptr"][cluster], found["work_indptr"][cluster + 1]):
            request, tile = found["q_indptr"][piece] // rows, found["q_start"][piece] // (64 * grid.cluster)
            low, high = found["kv_start"][piece], found["kv_end"][piece]
            assert found["kv_indptr"][piece] == request * WIDTH and found["q_len"][piece] == rows
            assert found["kv_len"][piece] == lengths[request] + (rows if causal else 0)
            steps[cluster] += max(1, -(-(high - low) // TILE_TOKENS))
            seen.setdefault((request, tile), []).append((low, high))
            if found["partial_indptr"][piece] >= 0:
                here = min(rows * heads - tile * 64 * grid.cluster, 64 * grid.cluster)
                for row in range(found["partial_indptr"][piece], found["partial_indptr"][piece] + here):
                    assert row not in partial_rows, "two pieces write to one place"
                    partial_rows[row] = here
    assert max(partial_rows, default=-1) < grid.max_partial_rows
    # nobody has more than an equal share, or a short span
    assert max(steps) <= max(3, -(-sum(steps) // grid.clusters))
    for request, length in enumerate(lengths):
        for tile in range(grid.tiles):
            last = min(-(-(tile + 1) * 64 * grid.cluster // heads), rows)
            end = length + last if causal else length
            pieces = seen.pop((request, tile))
            assert [low for low, _ in pieces] == [0, *(high for _, high in pieces[:-1])] and pieces[-1][1] == end
    assert not seen
    merged = [
        row for begin, end in zip(found["merge_begin"], found["merge_end"], strict=True) for row in range(begin, end)
    ]
    assert len(merged) == len(set(merged)) and sum(partial_rows.values()) >= len(merged)
