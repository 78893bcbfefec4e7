"""Attention backends in the engine: chosen per role and phase, refused at the start, and what a round copies."""

import dataclasses
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attention.backend import BACKENDS, AttentionBackend, build_backend
from attention.config import DraftAttention, TargetAttention
from attention.metadata import Mode
from speculative.backends import ModelShape, draft_backends, needs_cpu_seq_lens, target_backends
from speculative.build import EngineSpec, _captures, build_worker, plan_layout
from speculative.config import SpeculativeConfig
from speculative.decoding import EagleDecoding
from speculative.drafter import DraftRunner
from speculative.loading import load_draft
from tests.speculative.conftest import Pair
from workers.decoding import Autoregressive, DecodingStrategy, StepBatch
from workers.loading import PoolSize, load_target
from workers.model_runner import TargetRunner
from workers.sampler import Sampler, SamplingNeeds
from workers.slots import SlotTable
from workers.tp import SOLO

META = torch.device("meta")
Round = Callable[[SpeculativeConfig | None, str], DecodingStrategy]


def of(name: str, modes: list[Mode]) -> dict[Mode, AttentionBackend]:
    return dict.fromkeys(modes, build_backend(name, Mode.DECODE))


TARGET_MODES = [Mode.PREFILL, Mode.DECODE, Mode.VERIFY]
DRAFT_MODES = [Mode.PREFILL, Mode.DRAFT_EXTEND, Mode.DRAFT_DECODE]


def test_a_start_is_refused_before_anything_is_loaded(pair: Pair) -> None:
    spec = pair.spec(pair.chain())
    worker = dataclasses.replace(spec.worker, attention=TargetAttention(decode="trtllm"))
    with pytest.raises(ValueError, match=r"^attention.decode=trtllm: trtllm cannot serve decode: device=cpu: it needs "
                                         r"a GPU; those that can: torch$"):
        build_worker(dataclasses.replace(spec, worker=worker), plan_layout(spec), 0, "")
    spec = dataclasses.replace(spec, draft_attention=DraftAttention(extend="fa9"))
    with pytest.raises(ValueError, match=r"^draft_attention.extend=fa9: fa9 cannot serve draft_extend: there is no "
                                         r"such backend; those that can: torch$"):
        build_worker(spec, plan_layout(spec), 0, "")


def shape_on(pair: Pair, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> ModelShape:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("attention.backend.find_spec", lambda package: package)
    layout = plan_layout(pair.spec(pair.chain()))
    config = dataclasses.replace(layout.target, head_dim=128)
    return ModelShape(config, 1, torch.bfloat16, 16, torch.device("cuda", 0))


def test_each_role_and_phase_has_its_backend(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_on(pair, (9, 0), monkeypatch)
    names = TargetAttention(prefill="flashinfer", decode="trtllm")
    target = target_backends(names, shape, pair.tree())
    assert {mode: backend.name for mode, backend in target.items()} == {
        Mode.PREFILL: "flashinfer", Mode.DECODE: "trtllm", Mode.VERIFY: "trtllm"}
    assert target[Mode.DECODE] is target[Mode.VERIFY]
    draft = draft_backends(DraftAttention("flashinfer", "trtllm", "flashinfer"), shape, pair.tree())
    assert [draft[mode].name for mode in DRAFT_MODES] == ["flashinfer", "trtllm", "flashinfer"]
    assert set(target_backends(names, shape, None)) == {Mode.PREFILL, Mode.DECODE}


@pytest.mark.parametrize("capability,decode,reason", [
    ((9, 0), "trtllm", "draft_decode: a tree's draft rows see columns of earlier steps"),
    ((8, 0), "trtllm", "compute capability 8.0: must be 9.0 or later; those that can: torch, triton, flashinfer"),
])
def test_a_tree_s_drafting_is_refused_where_masks_are_too_narrow(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], decode: str, reason: str
) -> None:
    shape = shape_on(pair, capability, monkeypatch)
    with pytest.raises(ValueError, match=reason):
        draft_backends(DraftAttention("torch", "torch", decode), shape, pair.tree())


def test_a_chain_s_drafting_is_not(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_on(pair, (9, 0), monkeypatch)
    assert draft_backends(DraftAttention("torch", "torch", "trtllm"), shape, pair.chain())


def test_a_missing_package_names_the_extra(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_on(pair, (9, 0), monkeypatch)
    monkeypatch.setattr("attention.backend.find_spec", lambda package: None)
    with pytest.raises(ValueError, match=r"flashinfer is not installed: pip install 'aerie\[cuda\]'; those that "
                                         r"can: torch$"):
        target_backends(TargetAttention(prefill="flashinfer"), shape, None)


def test_one_backend_that_plans_on_the_host_costs_the_graphs(
    pair: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = shape_on(pair, (9, 0), monkeypatch)
    prefill_only = target_backends(TargetAttention("flashinfer", "trtllm"), shape, pair.chain())
    draft = draft_backends(DraftAttention("flashinfer", "trtllm", "trtllm"), shape, pair.chain())
    assert needs_cpu_seq_lens(prefill_only, draft) is None
    draft = draft_backends(DraftAttention("flashinfer", "flashinfer", "trtllm"), shape, pair.chain())
    reason = needs_cpu_seq_lens(prefill_only, draft)
    assert reason == "flashinfer in draft_extend"
    with caplog.at_level(logging.WARNING):
        assert _captures(pair.spec(), shape.device, None, rank=0)
        assert not any(_captures(pair.spec(), shape.device, reason, rank) for rank in (0, 1))
    (record,) = caplog.records
    assert "without CUDA graphs" in record.message and "flashinfer in draft_extend plans there" in record.message


def strategy_on_meta(pair: Pair, speculative: SpeculativeConfig | None) -> DecodingStrategy:
    """An engine whose tensors have shapes and no values, so that whatever reads one on the host fails."""
    spec: EngineSpec = pair.spec(speculative)
    layout = plan_layout(spec)
    slots = SlotTable(4, 64, layout.target.vocab_size, META)
    capture = layout.draft.capture if layout.draft else ()
    model = load_target(spec.worker.model, layout.target, SOLO, META, layout.max_position, capture)
    pool = PoolSize.of(layout.target, 1, layout.dtype).make(50, 4, META)
    target, sampler = TargetRunner(model, pool, of("torch", TARGET_MODES)), Sampler(slots, model.lm_head.shard)
    if speculative is None or layout.draft is None:
        return Autoregressive(target, slots, sampler)
    head = load_draft(speculative, layout.draft, spec.worker.model, model, SOLO, META, layout.max_position)
    pool = PoolSize.of(layout.draft.model, 1, layout.dtype).make(50, 4, META)
    return EagleDecoding(speculative, target, DraftRunner(head, pool, of("torch", DRAFT_MODES)), slots, sampler)


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("kind", ["plain", "chain", "tree"])
def test_a_round_reads_nothing_on_the_host(pair: Pair, kind: str, random: bool) -> None:
    """Neither lengths nor anything else: every tensor of the round is on the meta device."""
    assert not BACKENDS["torch"].cpu_seq_lens_modes
    speculative = {"plain": None, "chain": pair.chain(), "tree": pair.tree()}[kind]
    strategy = strategy_on_meta(pair, speculative)
    slots = torch.zeros(3, dtype=torch.int64, device=META)
    needs = SamplingNeeds(random=random, full_logits=False, shaping=False, num_logprobs=-1)
    shape = len(strategy.shapes) - 1
    with torch.inference_mode():
        out = strategy.step(StepBatch(slots, (0, 1, 2), shape, 100, None, needs, speculates=shape > 0))
    assert out.tokens.shape == (3, strategy.shapes[shape].max_new_tokens)


def test_the_meta_device_notices_a_read() -> None:
    length: Tensor = torch.zeros(3, dtype=torch.int32, device=META)
    for read in (lambda: length.tolist(), lambda: length.cpu(), lambda: length[0].item(), lambda: length.nonzero()):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read()
