"""Norms of latent rows in deterministic engines: the same bits from partial sums (rounds of up to 8 rows) as from their
sum (any other step)."""

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed here")

from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows  # noqa: E402
from aerie.kernels.kv.batches import LatentKV  # noqa: E402
from aerie.kernels.latent import latents_triton  # noqa: E402
from aerie.kernels.latent.latents_triton import normed_latents  # noqa: E402
from aerie.kernels.rope.rope_store import Angles  # noqa: E402
from tests.kernels.attend.test_triton_compile import built  # noqa: E402
from tests.support.kernels.triton_interpreter import DEVICE, INTERPRETED, MARKS  # noqa: E402

PARTS = 7
Q, LATENT, ROTATED = (256, 128, 32) if INTERPRETED else (1536, 512, 64)  # DeepSeek-V3's
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # numpy has no bfloat16
ROWS = 6 if INTERPRETED else 4096
POINTERS = {"q_weight_ptr": "bf16", "row_weight_ptr": "bf16", "q_ptr": "fp8e4nv", "pool_ptr": "bf16"}
POINTERS |= dict.fromkeys(("cos_ptr", "sin_ptr", "q_scales_ptr"), "fp32")
POINTERS |= dict.fromkeys(("position_ptr", "slot_ptr"), "i64")


def inputs_of(rows: int, device: torch.device) -> tuple[Callable[[Tensor], tuple[Tensor | Fp8Rows, Tensor]], Tensor]:
    """Return a function that norms latents and returns q and the pool's rows; and float32 partial sums."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    parts = random(PARTS, rows, Q + LATENT + ROTATED) * random(1, rows, 1).exp()
    weights = [random(size).to(HALF) for size in (Q, LATENT)]
    angle = random(rows, ROTATED // 2) * 3
    angles = Angles(angle.cos(), angle.sin(), torch.arange(rows, device=device))
    slots = torch.arange(rows, device=device)

    def run(both: Tensor) -> tuple[Tensor | Fp8Rows, Tensor]:
        kv = LatentKV(torch.zeros(rows, 1, LATENT + ROTATED, dtype=HALF, device=device), LATENT)
        q = normed_latents(both, *weights, 1e-6, angles, kv, slots, wanted=Fp8Inputs(True, 1 << 20), fixed=True)
        return q, kv.rows

    return run, parts


def summed(parts: Tensor) -> Tensor:
    """Return the sum in the order of parts, as the product of many rows leaves it."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(HALF)


class TestBits:
    pytestmark = MARKS

    def test_partial_sums_and_their_sum_have_the_same_bits(self) -> None:
        run, parts = inputs_of(ROWS, DEVICE)
        (q, rows), (q_of_sum, rows_of_sum) = run(parts.contiguous()), run(summed(parts))
        assert isinstance(q, Fp8Rows) and isinstance(q_of_sum, Fp8Rows)
        assert torch.equal(rows, rows_of_sum) and rows.abs().max() > 0
        assert torch.equal(q.values.view(torch.uint8), q_of_sum.values.view(torch.uint8))
        assert torch.equal(q.scales, q_of_sum.scales)


class Launch:
    """Stands for the kernel, and keeps its arguments."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *tensors, **options: self.options.update(options)


def reductions(options: dict[str, Any], of_parts: bool) -> list[str]:
    """Return the float32 sums of the kernel as compiled for an H200, each with the layout that decides its order."""
    constants = {name: value for name, value in options.items() if name.isupper()} | {"PDL": True, "INTERPRETED": False}
    pointers = POINTERS | {"both_ptr": "fp32" if of_parts else "bf16"}
    kernel = latents_triton._normed_latents
    text = built(kernel, pointers, constants, options["num_warps"], 3, {}).asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.blocked<.*>)$", text, re.M))
    found = re.findall(r'"tt\.reduce"\(.*?\}\) : \((tensor<\w+xf32, (#\w+)>)\)', text, re.S)
    return [f"{tensor.split(',')[0]} {layouts[layout]}" for tensor, layout in found]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
def test_sums_of_squares_are_added_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of DeepSeek-V3 had one answer of 60 with another log-probability (H200): partial sums were normed by 16
    warps, and their sum by 8."""
    launch, found = Launch(), []
    run, parts = inputs_of(2, torch.device("cpu"))
    for both in (parts, summed(parts)):
        with monkeypatch.context() as patch:
            patch.setattr(latents_triton, "_normed_latents", launch)
            patch.setattr(latents_triton, "pdl_wait", lambda device: {})
            run(both)
        assert launch.options["enable_fp_fusion"] is False
        found.append(reductions(launch.options, both.dim() == 3))
    assert found[0] == found[1] and len(found[0]) == 3, "the key's and the query's squares, and FP8 scales"
