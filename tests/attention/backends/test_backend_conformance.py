"""Every backend in every mode against the torch backend in float64, with the padding that production uses, and through
capture and replay with other lengths. The torch backend itself runs everywhere, in the type that CPUs use; the others
need a GPU.

A tolerance bounds ||out - expected|| / ||expected|| of one row and head: weights and results are rounded to the cache's
type, each by at most half a unit in the last place; twice that is bound enough. For float32, sums of up to 10^4 terms.

Where FlashInfer may not compile (FLASHINFER_DISABLE_JIT) a kernel that was not built beforehand is skipped by name.
"""

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from aerie.attention.backend import AttentionBackend
from aerie.attention.backends.torch_backend import TorchBackend
from aerie.attention.registry import BACKENDS, build_backend, needs_cpu_seq_lens, refusal
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.kv.batches import DecodeBatch, Mode, PrefillBatch
from tests.bench.kernels.gpu_time import captured
from tests.support.kernels.attention_cases import (
    LATENT_SHAPES,
    LENGTHS,
    MAX_LENGTH,
    RULED,
    SHAPES,
    WINDOWED,
    WORKS,
    Shape,
    Work,
    decode_batch,
    in_float64,
    num_pages,
    prefill_batch,
    random_pool,
    random_rows,
    use_of,
)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
WIDE = Work("verify a wide tree", Mode.VERIFY, 40, 40, tree=True)  # a mask of more than 32 bits a row
CASES = [
    pytest.param(work, shape, id=f"{work.name.replace(' ', '_')}-{shape.name}")
    for work, shape in (
        *itertools.product(WORKS, (*SHAPES, *LATENT_SHAPES)),
        *itertools.product(WINDOWED, (*SHAPES[:3], *LATENT_SHAPES[:2])),
        (WIDE, SHAPES[0]),
        (WIDE, LATENT_SHAPES[0]),
        *itertools.product(RULED, (*SHAPES[:4], SHAPES[9])),
    )
]
# The torch backend has one way through for every shape, and on a CPU one type: each work in one small shape, each shape
# in one work of many tokens, two in a round too, and the rest of the cross as slow.
EVERY_SHAPE = ("prefill",)
CPU_SHAPES = tuple(dict.fromkeys(dataclasses.replace(s, dtype=torch.float32) for s in (*SHAPES, LATENT_SHAPES[-1])))
EVERY_WORK = CPU_SHAPES[1]
IN_ROUNDS = CPU_SHAPES[0], CPU_SHAPES[-1]
CPU_CASES = [
    pytest.param(
        work,
        shape,
        id=f"{work.name.replace(' ', '_')}-{shape.name}",
        marks=()
        if shape == EVERY_WORK or work.name in EVERY_SHAPE or (shape in IN_ROUNDS and work.name == "verify a tree")
        else pytest.mark.slow,
    )
    for work, shape in (
        *itertools.product(WORKS, CPU_SHAPES),
        *((work, EVERY_WORK) for work in (WIDE, *WINDOWED)),
        (WINDOWED[-1], CPU_SHAPES[-1]),
    )
]
on_gpu = pytest.mark.gpu


@pytest.mark.parametrize("work,shape", CPU_CASES)
def test_torch_on_a_cpu(work: Work, shape: Shape) -> None:
    Conformance("torch", work, shape, torch.device("cpu")).check()


@on_gpu
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "torch"])
@pytest.mark.parametrize("work,shape", CASES)
def test_backend_on_a_gpu(name: str, work: Work, shape: Shape) -> None:
    use = use_of(work, shape, capability=torch.cuda.get_device_capability())
    reason = refusal(name, use)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    case = Conformance(name, work, shape, torch.device("cuda", 0))
    with skipping_what_was_not_built():
        case.check()
    if work.mode is not Mode.PREFILL and not needs_cpu_seq_lens(name, work.mode):
        case.check_replay()


@contextlib.contextmanager
def skipping_what_was_not_built() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not (os.environ.get("FLASHINFER_DISABLE_JIT") and "JIT" in str(error)):
            raise
        pytest.skip(f"not built: {str(error).splitlines()[0][:200]}")


class Conformance:
    """One backend in one mode on one shape. The batch's tensors stay where they are; `fill` gives them other values."""

    def __init__(self, name: str, work: Work, shape: Shape, device: torch.device) -> None:
        torch.manual_seed(len(name) + 10 * work.rows + shape.page_size)
        self.backend: AttentionBackend = build_backend(name, work.mode)
        self.work, self.shape, self.device = work, shape, device
        self.kv = random_pool(shape, num_pages(shape.page_size, work.suffix_len), device).layer(0)
        self.wide = in_float64(self.kv)
        self.batch: DecodeBatch | PrefillBatch
        if work.mode is Mode.PREFILL:
            self.batch = prefill_batch(shape, device, work.window)
        else:
            self.batch = dataclasses.replace(decode_batch(work, shape, LENGTHS[0], device), max_kv_len=MAX_LENGTH)
        self.q = random_rows(self.batch.num_rows, shape, device)
        scale = shape.head_dim**-0.5 * 1.25  # not the default of any library
        self.rule = dataclasses.replace(work.rule or ScoreRule(1.0), scale=scale)
        self.sinks = torch.randn(shape.num_heads, device=device) if self.rule.has_sinks else None

    def run(self) -> Tensor:
        prepared = self.backend.prepare(self.batch)
        prepared.forward(self.q, self.kv, self.rule, self.sinks)
        return prepared.forward(self.q, self.kv, self.rule, self.sinks)  # the second layer finds what the first left

    def check(self) -> None:
        for lengths in LENGTHS:
            self.fill(lengths)
            self.assert_close(self.run())

    def check_replay(self) -> None:
        outputs: list[Tensor] = []
        graph = captured(lambda: outputs.append(self.run()))
        for lengths in (*LENGTHS, LENGTHS[0][::-1]):
            self.fill(lengths)
            graph.replay()
            self.assert_close(outputs[-1])

    def fill(self, lengths: tuple[int, ...]) -> None:
        """Other requests: lengths, pages, masks and rows, in place."""
        self.q.copy_(random_rows(self.batch.num_rows, self.shape, self.device))
        if isinstance(self.batch, DecodeBatch):
            other = decode_batch(self.work, self.shape, lengths, self.device)
            for name in ("prefix_len", "mask", "page_table"):
                getattr(self.batch, name).copy_(getattr(other, name))

    def assert_close(self, out: Tensor) -> None:
        assert out.dtype == self.q.dtype and out.is_contiguous()
        assert out.shape == (*self.q.shape[:2], self.shape.value_dim)
        batch = self.batch
        if isinstance(batch, DecodeBatch):  # the reference reads up to the bound
            batch = dataclasses.replace(batch, max_kv_len=int(batch.prefix_len.max()) + batch.suffix_len)
        expected = TorchBackend().prepare(batch).forward(self.q.double(), self.wide, self.rule, self.sinks)
        error = (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        tolerance = TOLERANCE[self.shape.dtype]
        assert error.max() < tolerance, f"relative error {error.max():.2e} at {error.argmax()} of {error.shape}"
