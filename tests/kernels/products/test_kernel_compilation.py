"""Kernels are compiled ahead of their launch, by threads, as the launch would have compiled them: with Triton's own
compiler for Hopper and a driver that needs no GPU."""

import fcntl
import hashlib
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels need triton, which is not installed here")

import triton.language as tl  # noqa: E402

from aerie.attention.backend import NewUnderCaptureError  # noqa: E402
from aerie.kernels.attend import split_kv_triton  # noqa: E402
from aerie.kernels.gemm import skinny_triton as skinny_gemm  # noqa: E402
from aerie.kernels.norm import norm_triton  # noqa: E402
from aerie.kernels.vocabulary import topk_log_softmax_triton as argmax  # noqa: E402
from aerie.kernels.vocabulary import topk_log_softmax_triton as topk  # noqa: E402
from aerie.workers.runner.graphs.compile_jobs import (  # noqa: E402
    CompileProcesses,  # noqa: E402
    KernelJob,
    Outcome,
    compile_job,
    content_hash,
)
from aerie.workers.runner.graphs.kernel_compilation import CompileAhead, no_new_kernels, report_compilations  # noqa: E402
from tests.support.kernels.triton_driver import Hopper  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hopper]:
    hopper = Hopper()
    monkeypatch.setattr(triton.runtime.driver, "_active", hopper)
    yield hopper


def kernel_of(driver: Hopper) -> Any:
    @triton.jit
    def double(x_ptr, out_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        columns = tl.arange(0, BLOCK)
        tl.store(out_ptr + columns, 2 * tl.load(x_ptr + columns))

    return double


def launch(kernel: Any, block: int) -> None:
    x = torch.zeros(block)
    kernel[(3,)](x, x, BLOCK=block)


def test_a_dry_run_compiles_what_it_meets_and_launches_only_what_is_there(driver: Hopper) -> None:
    kernel, ahead = kernel_of(driver), CompileAhead(2)
    launch(kernel, 16)
    with ahead.dry_run():
        for block in (16, 32, 64, 32):
            launch(kernel, block)
    assert driver.launched == [(3, 1, 1)] * 2, "those of 16, which were compiled before"
    ahead.finish()
    ahead.finish()
    assert ahead.num_kernels == 2 and driver.loaded == ["double"] * 3
    with no_new_kernels():
        for block in (16, 32, 64):
            launch(kernel, block)
    assert len(driver.launched) == 5 and len(driver.loaded) == 3
    ahead.close()


def test_under_capture_a_new_kernel_is_refused_and_compiled_later(driver: Hopper) -> None:
    kernel = kernel_of(driver)
    with no_new_kernels(), pytest.raises(NewUnderCaptureError, match="not compiled yet"):
        launch(kernel, 16)
    assert not driver.loaded
    launch(kernel, 16)
    assert driver.launched == [(3, 1, 1)]


def test_what_does_not_compile_fails_the_start(driver: Hopper) -> None:
    @triton.jit
    def wrong(x_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        tl.store(x_ptr + tl.arange(0, BLOCK), no_such_name)  # type: ignore[name-defined]  # noqa: F821

    ahead = CompileAhead(1)
    with ahead.dry_run():
        wrong[(1,)](torch.zeros(16), BLOCK=16)
    with pytest.raises(triton.CompilationError, match="no_such_name"):
        ahead.finish()
    ahead.close()


def test_a_kernel_that_a_step_waits_for_is_reported(driver: Hopper, caplog: pytest.LogCaptureFixture) -> None:
    """One that was compiled ahead is not, though a thread compiles it, nor one that is there."""
    kernel, ahead = kernel_of(driver), CompileAhead(2)
    report_compilations(True)
    try:
        with ahead.dry_run():
            launch(kernel, 16)
        ahead.finish()
        launch(kernel, 16)
        assert not caplog.records
        launch(kernel, 32)
    finally:
        report_compilations(False)
        ahead.close()
    launch(kernel, 64)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and " s until kernel double was " in record.getMessage()


def launch_two_kernels() -> None:
    argmax.largest(torch.zeros(2, 5000, dtype=torch.bfloat16))


def launch_kernels() -> None:
    """Launch kernels with all that distinguishes variants: tensor maps, None constants, options, early launch."""
    launch_two_kernels()
    topk.topk_log_softmax(torch.zeros(2, 5000, dtype=torch.bfloat16), 3)
    row = torch.zeros(4, 1024, dtype=torch.bfloat16)
    norm_triton._add_norm[(4,)](
        row, row, row, row, 1024, 1e-6, HAS_RESIDUAL=True, BLOCK=1024, num_warps=4, PDL=True, launch_pdl=True
    )
    weight = torch.zeros(2048, 1024, dtype=torch.bfloat16)
    tiles = skinny_gemm.skinny_gemm_tiles(4, 2048, 1024)
    assert tiles is not None
    workspace = skinny_gemm.Workspace(torch.zeros(1 << 20), torch.zeros(1 << 10, dtype=torch.int32))
    skinny_gemm.skinny_gemm(row, weight, None, workspace, tiles)


KERNELS = (argmax._partial_largest, argmax._combine_largest, topk._partial, topk._combine, norm_triton._add_norm)
NUM_KERNELS = len(KERNELS) + 1


@pytest.fixture
def compiled_here(driver: Hopper, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Names of the kernels that this process compiles into an empty cache, in place of finding them there."""
    names: list[str] = []

    def listen(*, src: Any, cache_hit: bool, **rest: object) -> None:
        names.extend([] if cache_hit else [src.name])

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    forget()
    yield names
    forget()  # they would be called with this test's driver


def forget() -> None:
    """As in a new process, no kernel has been asked for yet."""
    for kernel in (*KERNELS, skinny_gemm._skinny_gemm):
        kernel.device_caches.clear()


def compiled_ahead(processes: CompileProcesses, launch: Callable[[], None] = launch_kernels) -> CompileAhead:
    ahead = CompileAhead(processes=processes)
    with ahead.dry_run():
        launch()
    ahead.finish()
    ahead.close()
    return ahead


def test_a_rank_finds_what_processes_compiled(driver: Hopper, compiled_here: list[str]) -> None:
    ahead = compiled_ahead(CompileProcesses.start(2))
    assert compiled_here == [] and len(ahead.process_seconds) == ahead.num_kernels == NUM_KERNELS
    assert len(driver.loaded) == NUM_KERNELS and not driver.launched
    forget()  # a rank that is started later
    launch_kernels()
    assert compiled_here == [] and len(driver.launched) == NUM_KERNELS
    forget()
    ahead = compiled_ahead(ended())
    assert compiled_here == [] and ahead.process_seconds == [], "what is in the cache is not asked for"
    assert ahead.num_kernels == NUM_KERNELS and ahead.num_missing == 0


def test_a_rank_compiles_what_processes_do_not(
    driver: Hopper, compiled_here: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    ahead = compiled_ahead(ended())
    assert len(compiled_here) == len(driver.loaded) == ahead.num_missing == NUM_KERNELS and not ahead.process_seconds
    assert [record.levelname for record in caplog.records] == ["WARNING"], "said once"
    assert "the process ended" in caplog.text


def ended() -> CompileProcesses:
    """Return compile processes of which none is left."""
    ours, theirs = socket.socketpair()
    theirs.close()
    return CompileProcesses([Connection(ours.detach())])


def test_a_kernel_under_another_key_is_not_compiled(compiled_here: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[KernelJob] = []
    with monkeypatch.context() as patch:
        patch.setattr(CompileProcesses, "compile", lambda _, job: jobs.append(job) or Outcome("not now"))
        compiled_ahead(ended(), launch_two_kernels)
    assert len(jobs) == 2
    assert "its cache key differs" in compile_job(replace(jobs[0], key=jobs[1].key)).error
    script = "import pickle, sys; from aerie.workers.runner.graphs.compile_jobs import CompileProcesses"
    script += "; from aerie.workers.runner.graphs.compile_jobs import import_compiler"
    script += "; import_compiler(); jobs = pickle.load(sys.stdin.buffer); processes = CompileProcesses.fork(2)"
    script += "; print([processes.compile(job).error for job in jobs])"
    other = subprocess.run(
        [sys.executable, "-c", script], input=pickle.dumps(jobs), stdout=subprocess.PIPE, check=True, timeout=300
    )
    assert other.stdout.decode().strip() == "['', '']", "by processes that were forked"
    held = locked(jobs[0])
    assert compile_job(jobs[0]) == Outcome(is_busy=True), "another process compiles it"
    os.close(held)
    assert compile_job(jobs[0]).error == ""


def test_a_kernel_is_compiled_whatever_else_the_rank_has_launched(driver: Hopper, compiled_here: list[str]) -> None:
    """Triton's hash of the planner has other constants if the functions that it calls were hashed before."""
    kernel = split_kv_triton._plan_items
    prefix = torch.zeros(2, dtype=torch.int32)
    hashes = set()
    for called_first in (False, True):
        for function in (kernel, split_kv_triton._best_span, split_kv_triton._store_items, split_kv_triton._store_idle):
            function.hash = None
            function.used_global_vals.clear()
        if called_first:
            assert split_kv_triton._best_span.cache_key and split_kv_triton._store_items.cache_key
            assert split_kv_triton._store_idle.cache_key
        kernel.device_caches.clear()
        ahead = compiled_ahead(CompileProcesses.start(1), lambda: split_kv_triton.plan_items(prefix, 1, 4, 64, 64, 8))
        hashes.add(kernel.cache_key)
        assert len(ahead.process_seconds) == 1 and compiled_here == []
    kernel.device_caches.clear()
    assert len(hashes) == 2, "else nothing was shown"


def test_content_differs_by_the_constants_of_called_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    before = content_hash(split_kv_triton._plan_items)
    assert content_hash(split_kv_triton._plan_items) == before != content_hash(split_kv_triton._plan_spans)
    monkeypatch.setattr(split_kv_triton, "IDLE_AT_ONCE", tl.constexpr(256))
    assert content_hash(split_kv_triton._plan_items) != before


def locked(job: KernelJob) -> int:
    """The file by which a process that compiles `job` keeps others from it."""
    manager = triton.runtime.cache.get_cache_manager(hashlib.sha256(job.key.encode()).hexdigest())
    file = os.open(manager.cache_dir, os.O_RDONLY)
    fcntl.flock(file, fcntl.LOCK_EX)
    return file
