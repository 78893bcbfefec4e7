"""Attention launched early on a GPU, 10^5 times with other lengths each time; `pdl_stress` runs more. Its own check is
tried on a CPU, under Triton's interpreter, where nothing is launched early."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton, which is not installed here")

from aerie.attention.backends import triton_backend  # noqa: E402
from tests.kernels.pdl_stress import LAYERS, PASSES, TOLERANCE, Stress, repeated, worst_error  # noqa: E402
from tests.support.kernels.triton_interpreter import DEVICE, INTERPRETED  # noqa: E402

interpreted = pytest.mark.skipif(not INTERPRETED, reason="tries the stress where kernels are interpreted")


@pytest.mark.gpu
def test_no_launch_reads_what_is_not_yet_written() -> None:
    assert worst_error(100_000, DEVICE) < TOLERANCE


@interpreted
@pytest.mark.slow  # the kernels by themselves: `test_implementations`; the stress can fail: below
def test_the_stress_finds_nothing_where_there_is_nothing() -> None:
    stress = Stress(DEVICE, torch.float32, num_requests=2, max_length=150)
    repeated(stress, LAYERS * PASSES)()
    assert int(stress.turn) == PASSES
    assert float(stress.worst) < 1e-5


@interpreted
def test_the_stress_notices_the_plan_of_the_pass_before(monkeypatch: pytest.MonkeyPatch) -> None:
    stress = Stress(DEVICE, torch.float32, num_requests=2, max_length=150)
    plan_items = triton_backend.plan_items
    lengths = [stress.lengths[0]]

    def stale(prefix_len: torch.Tensor, *rest: int) -> object:
        lengths.append(prefix_len)
        return plan_items(lengths[-2], *rest)

    stress.run_pass(plans_before_the_store=True)
    monkeypatch.setattr(triton_backend, "plan_items", stale)
    stress.run_pass(plans_before_the_store=True)
    assert not float(stress.worst) < TOLERANCE


@interpreted
def test_the_stress_notices_kv_that_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    stress = Stress(DEVICE, torch.float32, num_requests=2, max_length=150)
    monkeypatch.setattr("tests.kernels.pdl_stress.rope_store", lambda *args, **options: None)
    stress.run_pass(plans_before_the_store=True)
    assert not float(stress.worst) < TOLERANCE
