"""The flashinfer backend's calls of FlashInfer for prompt chunks, recorded by a stand-in: no GPU, no package.
Rounds: `test_flashinfer_rounds`. Results are compared on a GPU by `test_backend_conformance`."""

import dataclasses
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from aerie.attention.backends.flashinfer_backend import Extent, paged
from aerie.attention.registry import BACKENDS, build_backend, limit
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.kv.batches import Mode
from aerie.kernels.kv.stored_values import FP8
from tests.support.kernels.attention_cases import (
    WORKS,
    Shape,
    num_pages,
    prefill_batch,
    random_pool,
    random_rows,
    use_of,
)

CPU = torch.device("cpu")
SHAPE = Shape()


class RecordingWrapper:
    """`made` lists all of a test."""

    made: list["RecordingWrapper"]

    def __init__(self, workspace: Tensor, layout: str, **settings: Any) -> None:
        assert layout == "NHD" and workspace.dtype == torch.uint8
        self.settings = settings
        self.plans: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.scales: list[dict[str, float]] = []
        RecordingWrapper.made.append(self)

    def plan(self, *args: Any, **kwargs: Any) -> None:
        for tensor in args[:-4]:
            assert tensor.dtype == torch.int32
        self.plans.append((args, kwargs))

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], out: Tensor, enable_pdl: bool, **scales: float) -> Tensor:
        assert not enable_pdl, "its kernels read the plan before they wait"
        self.scales.append(scales)
        return out


class NoEvent:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture(autouse=True)
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("flashinfer")
    package.BatchPrefillWithPagedKVCacheWrapper = RecordingWrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setattr(torch.cuda, "Event", NoEvent)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    RecordingWrapper.made = []


def test_prompt_chunks_are_planned_from_the_step_plan_alone() -> None:
    """Their page table may be anywhere: on the meta device no value can be read."""
    host = prefill_batch(SHAPE, CPU)
    tensors = {name: getattr(host, name).to("meta") for name in ("qo_indptr", "starts", "page_table")}
    batch = dataclasses.replace(host, **tensors)
    prepared = build_backend("flashinfer", Mode.PREFILL).prepare(batch)
    assert prepared.extent.kv_lens == [40, 34, 135, 1064]  # type: ignore[attr-defined]

    kv = random_pool(SHAPE, num_pages(16, 16), CPU).layer(0)
    prepared = build_backend("flashinfer", Mode.PREFILL).prepare(host)
    for _ in range(2):
        prepared.forward(random_rows(host.num_rows, SHAPE, CPU), kv, ScoreRule(0.125))
    (wrapper,) = RecordingWrapper.made
    assert wrapper.settings == {"backend": "fa3"}
    (((qo_indptr, kv_indptr, _, last_page_len, *shape), options),) = wrapper.plans  # once, not for each layer
    assert qo_indptr.tolist() == [0, 40, 41, 171, 235] and kv_indptr.tolist() == [0, 3, 6, 15, 82]
    assert last_page_len.tolist() == [8, 2, 7, 8]
    assert shape == [8, 2, 128, 16] and options["sm_scale"] == 0.125 and options["causal"]


def test_plans_take_turns_on_two_wrappers() -> None:
    backend = build_backend("flashinfer", Mode.PREFILL)
    kv = random_pool(SHAPE, num_pages(16, 1), CPU).layer(0)
    batch = prefill_batch(SHAPE, CPU)
    for _ in range(5):
        backend.prepare(batch).forward(random_rows(batch.num_rows, SHAPE, CPU), kv, ScoreRule(1.0))
    assert [len(wrapper.plans) for wrapper in RecordingWrapper.made] == [3, 2]


def test_kv_in_fp8_goes_to_fa2_with_the_scales_of_each_layer() -> None:
    """Layers share a plan, whatever their scales; a scale of 1 costs no kernel."""
    shape, batch = Shape(kv_dtype=FP8), prefill_batch(SHAPE, CPU)
    kv = random_pool(shape, num_pages(16, 16), CPU).layer(0)
    prepared = build_backend("flashinfer", Mode.PREFILL).prepare(batch)
    for k_scale, v_scale in ((0.5, 3.0), (1.0, 0.25), (1.0, 1.0)):
        layer = dataclasses.replace(kv, k_scale=k_scale, v_scale=v_scale)
        prepared.forward(random_rows(batch.num_rows, shape, CPU), layer, ScoreRule(0.125))
    (wrapper,) = RecordingWrapper.made
    assert wrapper.settings == {"backend": "fa2"}
    ((_, options),) = wrapper.plans
    assert options["kv_data_type"] == FP8 and options["q_data_type"] == shape.dtype and options["sm_scale"] == 0.125
    assert wrapper.scales == [{"k_scale": 0.5, "v_scale": 3.0}, {"v_scale": 0.25}, {}]


def test_fp8_is_refused_over_latent_rows_only() -> None:
    verify = next(work for work in WORKS if work.mode is Mode.VERIFY)
    for shape, said in ((Shape(kv_dtype=FP8), None), (Shape(576, 128, 64, latent=512, kv_dtype=FP8), "fp8_e4m3")):
        reason = limit(BACKENDS["flashinfer"], use_of(verify, shape))
        assert reason is None if said is None else reason is not None and said in reason


def test_page_lists_of_pages_of_one() -> None:
    table = torch.tensor([[4, 2, 9], [7, 0, 0]], dtype=torch.int32)
    indptr, indices, last = paged(Extent([0, 1], [1, 1], [3, 1], table), 1)
    assert (indptr.tolist(), indices.tolist(), last.tolist()) == ([0, 3, 4], [4, 2, 9, 7], [1, 1])
