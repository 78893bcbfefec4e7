"""The kernel that sums rows over peer memory, with ranks as processes: under Triton's interpreter (TRITON_INTERPRET=1),
where they share files, which `tests/kernels/test_triton_interpreter.py` starts, and compiled for Hopper. On GPUs
it is tested by `test_custom_all_reduce_gpu.py`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed here")

from aerie.kernels.collectives import all_reduce_triton as kernels  # noqa: E402
from aerie.kernels.collectives.all_reduce import reference  # noqa: E402
from aerie.workers.distributed.custom_all_reduce import CustomAllReduce, Limits, Method, region_bytes  # noqa: E402
from tests.support.kernels.triton_interpreter import INTERPRETED  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

WIDTH = 70  # 35 words, in blocks of 64
LIMITS = Limits(one_shot=4 * WIDTH * 2, two_shot=0)


def inputs(call: int, rows: int, size: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    """Every rank's part, the residual and the weight of a call: the same on every rank. bfloat16: whole numbers, since
    the interpreter of Triton 3.6 cuts bits off where a GPU rounds."""
    generator = torch.Generator().manual_seed(call)
    numbers = torch.randn((size + 1, rows, WIDTH), generator=generator)
    if dtype == torch.bfloat16:
        numbers = torch.round(8 * numbers)
    *parts, residual = numbers.to(dtype).unbind(0)
    weight = torch.rand(WIDTH, generator=generator) + 0.5
    return parts, residual.clone(), weight if call % 4 == 3 else weight.to(dtype)


def sums_of_one_rank(
    rank: int, size: int, address: str, folder: str, row_counts: list[int], dtype: torch.dtype
) -> list[tuple[list[float], list[float]]]:
    """Return each call's result on this rank and the residual after it, asserted to be right; odd calls have a norm."""
    num_bytes = region_bytes(LIMITS, size)
    regions = [torch.from_file(f"{folder}/{r}", shared=True, size=num_bytes, dtype=torch.uint8) for r in range(size)]
    peers = CustomAllReduce(rank, LIMITS, regions, "")
    results = []
    for call, rows in enumerate(row_counts):
        parts, residual, weight = inputs(call, rows, size, dtype)
        assert peers.method(rows, WIDTH, dtype) is Method.ONE_SHOT
        if call % 2:
            expected_residual = residual.clone()
            expected = reference(parts, (expected_residual, weight, 1e-5))
            out = peers.add_norm(parts[rank], residual, weight, 1e-5)
            assert out is not None
            assert torch.equal(residual, expected_residual)
        else:
            expected = reference(parts)
            out = parts[rank]
            assert peers.all_reduce(out)
        # the mean of squares is summed in another order, and the interpreter cuts off where it should round, twice
        torch.testing.assert_close(out, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        results.append((out.flatten().tolist(), residual.flatten().tolist()))
    return results


@pytest.mark.skipif(not INTERPRETED, reason="runs under Triton's interpreter (TRITON_INTERPRET=1)")
@pytest.mark.parametrize("size,dtype", [(2, torch.bfloat16), (2, torch.float16), (4, torch.bfloat16)])
def test_every_rank_gets_the_same_right_sum_call_after_call(tmp_path: Path, size: int, dtype: torch.dtype) -> None:
    """Row counts change from call to call, so rows have seen different numbers of calls."""
    row_counts = [1, 4, 2, 4, 1, 1, 3, 1, 2, 4, 1] * (3 if dtype == torch.float16 else 1)
    for rank in range(size):
        (tmp_path / str(rank)).write_bytes(bytes(region_bytes(LIMITS, size)))
    results = run_ranks(sums_of_one_rank, size, str(tmp_path), row_counts, dtype, deadline_s=200)
    assert all(result == results[0] for result in results)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("width", [8192, 5120, 4096, 1024])
@pytest.mark.parametrize("weight", ["i32", "i64", None])
def test_kernel_fits_hopper(world: int, width: int, weight: str | None, tmp_path: Path) -> None:
    """weight: None without a norm."""
    import triton
    import triton.language as tl

    from tests.kernels.attend.test_triton_compile import compiled

    block = triton.next_power_of_2(width // 2)
    constants: dict[str, Any] = {
        "WORLD": world,
        "NORM": weight is not None,
        "HALF": tl.bfloat16,
        "BLOCK": block,
        "PDL": True,
    }
    pointers = {"inbox_ptr": "i64", "inboxes_ptr": "i64", "weight_ptr": weight or "i32"}
    warps = kernels.num_warps(world, block)
    spills, _, ptx = compiled(kernels._one_shot_all_reduce, tmp_path, pointers, constants, warps, 1)
    assert spills == 0
    assert "ld.volatile.global.v2.b64" in ptx and "st.global.v2.b64" in ptx  # words whole, two at a time
