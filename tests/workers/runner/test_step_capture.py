"""Memory that the first graphs of steps share."""

from typing import Any

import torch

from aerie.workers.runner.decoding import Passed
from aerie.workers.runner.graphs.step_capture import StepCapture

COUNT = 1 << 17  # of numbers, large enough to be shared


def test_tensors_of_two_dtypes_keep_theirs_and_share_memory_with_their_own() -> None:
    nothing: Any = None
    capture = StepCapture(nothing, nothing, 0, nothing)
    wide, narrow = torch.randn(1, COUNT), torch.randn(1, COUNT).bfloat16()
    kept = [capture._copy_to_shared(Passed(hidden)).hidden for hidden in (wide, narrow)]
    assert [each.dtype for each in kept] == [torch.float32, torch.bfloat16]
    assert torch.equal(kept[0], wide) and torch.equal(kept[1], narrow)
    smaller = capture._copy_to_shared(Passed(-wide[:, : COUNT - 3])).hidden
    assert smaller.data_ptr() == kept[0].data_ptr() and torch.equal(kept[0][:, 0], -wide[:, 0])
