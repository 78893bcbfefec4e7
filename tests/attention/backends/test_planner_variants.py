"""Which compiled planner a round takes: one for each power of two of requests, all of which the start captures. Steps
without a graph have any number of requests, and must not compile another."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton, which is not installed here")

from aerie.attention.backends import triton_backend  # noqa: E402
from aerie.attention.backends.triton_kernels import LayerShape  # noqa: E402
from aerie.kernels.attend import split_kv_triton  # noqa: E402
from aerie.kernels.kv.batches import DecodeBatch, Mode, causal_mask  # noqa: E402

MOST = 64  # requests
POWERS = tuple(1 << i for i in range(MOST.bit_length()))


class Recorder:
    """Takes the place of a kernel; collects the arguments that choose a compiled one."""

    def __init__(self, kernel: Any) -> None:
        self.arg_names, self.free = kernel.arg_names, set(kernel.do_not_specialize)
        self.variants: set[tuple[object, ...]] = set()

    def __getitem__(self, grid: object) -> Any:
        return self._launch

    def _launch(self, *args: object, **options: object) -> None:
        numbers = [
            (name, value) for name, value in zip(self.arg_names, args, strict=False)
            if not isinstance(value, torch.Tensor) and name not in self.free
        ]  # fmt: skip
        self.variants.add((*numbers, *sorted(options.items())))


@pytest.mark.parametrize("rows", [1, 4, 8, 9, 32])
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("shape", [LayerShape(32, 8, 128, None, 2, 2), LayerShape(24, 4, 256, None, 2, 2)])
def test_any_number_of_requests_takes_the_planner_of_a_power_of_two(
    shape: LayerShape, fixed: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_backend, "_num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(triton_backend, "plan_paths", lambda *args: None)
    name = "_plan_whole_spans" if fixed else "_plan_items"
    recorder = Recorder(getattr(split_kv_triton, name))
    monkeypatch.setattr(split_kv_triton, name, recorder)
    backend = triton_backend.TritonBackend(256 if fixed else None)

    def plan(num_requests: int) -> None:
        lengths = torch.full((num_requests,), 500, dtype=torch.int32)
        mask = causal_mask(num_requests, rows, torch.device("cpu"))
        table = torch.ones(num_requests, 40, dtype=torch.int32)
        batch = DecodeBatch(Mode.VERIFY, rows, rows, lengths, mask, table, 600)
        if fixed:
            triton_backend.plan_fixed(batch, shape, backend, 16)
        else:
            triton_backend.plan_decode(batch, shape, backend)

    for num_requests in POWERS:
        plan(num_requests)
    captured = set(recorder.variants)
    for num_requests in range(1, MOST):
        plan(num_requests)
    assert recorder.variants == captured
    assert len(captured) == len(POWERS)
