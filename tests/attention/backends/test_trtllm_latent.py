"""Rounds over latent rows by FlashInfer's MLA kernels, against a stand-in that follows their documentation: no GPU of
this kind has run them. Trees, whose masked columns a kernel of ours adds, under Triton's interpreter."""

import dataclasses
import inspect
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from aerie.attention.backends import trtllm_backend
from aerie.attention.backends.torch_backend import TorchBackend
from aerie.attention.backends.trtllm_backend import TrtllmBackend
from aerie.attention.limits import trtllm_refusal
from aerie.attention.registry import BACKENDS, limit, needs_cpu_seq_lens
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.kv.batches import DecodeBatch, Mode
from tests.support.kernels.attention_cases import (
    LENGTHS,
    WORKS,
    Shape,
    Work,
    decode_batch,
    in_float64,
    num_pages,
    random_pool,
    random_rows,
    use_of,
)
from tests.support.kernels.flashinfer_mla import MULTIPROCESSORS, OPTIONAL, REQUIRED, MlaStandIn
from tests.support.kernels.triton_interpreter import INTERPRETED
from tests.support.slow import slow

CPU, META = torch.device("cpu"), torch.device("meta")
GEN, XQA = Shape(576, 3, 32, latent=512), Shape(576, 128, 64, latent=512)
SMALL = Shape(320, 5, 64, latent=256)
ROUNDS = [work for work in WORKS if work.mode is not Mode.PREFILL]
CHAINS = [work for work in ROUNDS if not work.tree]
TREES = [work for work in ROUNDS if work.tree]
SHORT = (1, 17, 63, 130, 0, 0)
SCALE = 0.05


def on_device(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> MlaStandIn:
    """FlashInfer on a GPU of this capability."""
    stand_in = MlaStandIn("trtllm-gen" if capability[0] == 10 else "xqa")
    module = types.ModuleType("flashinfer.mla")
    module.trtllm_batch_decode_with_kv_cache_mla = stand_in  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(trtllm_backend, "num_multiprocessors", lambda device: MULTIPROCESSORS)
    return stand_in


def filled(work: Work, shape: Shape, lengths: tuple[int, ...], device: torch.device = CPU) -> DecodeBatch:
    batch = decode_batch(work, shape, lengths, device)
    width = -(-(max(lengths) + work.suffix_len) // shape.page_size) + 1
    return dataclasses.replace(batch, page_table=batch.page_table[:, :width].contiguous())


def check(work: Work, shape: Shape, backend: TrtllmBackend, lengths: tuple[int, ...]) -> None:
    """Two layers of a pass equal attention in float64, padding rows apart, which are finite."""
    batch = filled(work, shape, lengths)
    pool = random_pool(shape, num_pages(shape.page_size, work.suffix_len), CPU)
    kv, q = pool.layer(0), random_rows(batch.num_rows, shape, CPU)
    prepared = backend.prepare(batch)
    for _ in range(2):
        prepared.plan(q, kv, ScoreRule(SCALE))
        ours = prepared.forward(q, kv, ScoreRule(SCALE))
    expected = TorchBackend().prepare(batch).forward(q.double(), in_float64(kv), ScoreRule(SCALE))
    assert ours.shape == expected.shape and ours.dtype == torch.bfloat16 and torch.isfinite(ours).all()
    # a bfloat16 result, of a tree rounded twice
    torch.testing.assert_close(ours.double(), expected, atol=2**-6, rtol=2**-6)


@pytest.mark.parametrize(
    "shape,capability",
    [(GEN, (10, 0)), *slow((SMALL, (10, 3))), (XQA, (12, 0))],
    ids=["gen", "small", "xqa"],
)
@pytest.mark.parametrize("work", CHAINS, ids=lambda work: work.name)
def test_rows_of_chains_see_what_they_should(
    work: Work, shape: Shape, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in, backend = on_device(monkeypatch, capability), TrtllmBackend()
    torch.manual_seed(work.rows)
    check(work, shape, backend, SHORT)
    lengths = stand_in.calls[-1]["seq_lens"].view(len(SHORT), work.rows)
    rows = torch.arange(work.rows)
    expected = torch.tensor(SHORT).unsqueeze(1) + work.suffix_len - work.rows + 1 + rows
    assert torch.equal(lengths.long(), expected)


@pytest.mark.skipif(not INTERPRETED, reason="tests/kernels/test_triton_interpreter.py runs it")
@pytest.mark.parametrize("shape", [GEN, *slow(SMALL)], ids=["gen", "small"])
@pytest.mark.parametrize("work", TREES, ids=lambda work: work.name)
def test_trees_are_their_prefix_and_their_masked_columns(
    work: Work, shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among the requests one has no prefix: its rows see their own columns alone."""
    stand_in, backend = on_device(monkeypatch, (10, 0)), TrtllmBackend()
    torch.manual_seed(work.rows)
    check(work, shape, backend, SHORT)
    given = stand_in.calls[-1]
    assert given["return_lse"] and given["lse"].shape == (work.rows * len(SHORT), shape.num_heads)
    assert int(given["seq_lens"].min()) == 1 and given["lse"][-1].isneginf().all()


@pytest.mark.parametrize("work", CHAINS, ids=lambda work: work.name)
def test_replays_find_everything_where_it_was(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a captured graph holds by address: other lengths and tables are written in place."""
    stand_in, backend = on_device(monkeypatch, (10, 0)), TrtllmBackend()
    wide = 3072 // GEN.page_size
    for lengths in (LENGTHS[0], LENGTHS[1]):
        batch = decode_batch(work, GEN, lengths, CPU)
        batch = dataclasses.replace(batch, page_table=batch.page_table[:, :wide].contiguous())
        kv = random_pool(GEN, num_pages(GEN.page_size, work.suffix_len), CPU).layer(0)
        backend.prepare(batch).forward(random_rows(batch.num_rows, GEN, CPU), kv, ScoreRule(SCALE))
    first, second = stand_in.calls
    names = ["seq_lens", "workspace_buffer", "multi_ctas_kv_counter_buffer"]
    for name in names if work.rows == 1 else [*names, "block_tables"]:
        assert first[name].data_ptr() == second[name].data_ptr(), name
    assert not second["multi_ctas_kv_counter_buffer"].any()


def test_nothing_new_is_made_under_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    from aerie.attention.backend import NewUnderCaptureError

    on_device(monkeypatch, (10, 0))
    backend, asked = TrtllmBackend(), []

    def not_captured(name: str, device: torch.device, make: object = None) -> None:
        asked.append(device)
        raise NewUnderCaptureError(name)

    batch = filled(CHAINS[0], GEN, SHORT)
    kv, q = random_pool(GEN, num_pages(32, 1), CPU).layer(0), random_rows(batch.num_rows, GEN, CPU)
    backend.prepare(batch).forward(q, kv, ScoreRule(SCALE))
    monkeypatch.setattr("aerie.attention.backends.trtllm_backend.assert_not_captured", not_captured)
    backend.prepare(batch).forward(q, kv, ScoreRule(SCALE))  # of a shape that was there
    assert not asked
    with pytest.raises(NewUnderCaptureError):
        backend.prepare(filled(CHAINS[1], GEN, SHORT)).forward(
            random_rows(6 * len(SHORT), GEN, CPU), kv, ScoreRule(SCALE)
        )


@pytest.mark.parametrize("work", CHAINS, ids=lambda work: work.name)
def test_nothing_is_read_on_the_host(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device there is no value to read."""
    on_device(monkeypatch, (10, 0))
    batch = decode_batch(work, GEN, LENGTHS[0], META)
    kv = random_pool(GEN, num_pages(GEN.page_size, work.suffix_len), META).layer(0)
    TrtllmBackend().prepare(batch).forward(random_rows(batch.num_rows, GEN, META), kv, ScoreRule(SCALE))
    assert not needs_cpu_seq_lens("trtllm", work.mode) and not BACKENDS["trtllm"].cpu_seq_lens_modes


def test_a_tree_s_masks_are_read_where_their_builder_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """No buffer of the backend's own stands between."""
    on_device(monkeypatch, (10, 0))
    assert TrtllmBackend().tree_mask_buffer(4, 6, CPU) is None


def test_scratch_grows_with_the_statistics_of_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device: 64 requests of 8 rows and 128 heads."""
    stand_in = on_device(monkeypatch, (10, 0))
    monkeypatch.setitem(
        sys.modules,
        "aerie.kernels.attend.latent_suffix_triton",
        SimpleNamespace(add_suffix=lambda *_: None),  # type: ignore[arg-type]
    )
    shape, work = Shape(576, 128, 64, latent=512), Work("verify", Mode.VERIFY, 8, 8, tree=True)
    batch = decode_batch(work, shape, (100,) * 64, META)
    kv = random_pool(shape, 70, META).layer(0)
    TrtllmBackend().prepare(batch).forward(random_rows(batch.num_rows, shape, META), kv, ScoreRule(SCALE))
    assert stand_in.calls[0]["workspace_buffer"].numel() > 8 * 256 * 128 * 64 * 8 + (100 << 20)


@pytest.mark.parametrize(
    "changes,capability,reason",
    [
        ({}, (9, 0), "latent rows: compute capability 9.0: must be 10.x or 12.x"),
        ({}, (11, 0), "latent rows: compute capability 11.0: must be 10.x or 12.x"),
        ({"dtype": torch.float16}, (10, 0), "dtype=float16: must be bfloat16 over latent rows"),
        ({"page_size": 16}, (10, 0), "page_size=16: must be one of 32, 64 over latent rows"),
        (
            {"head_dim": 88, "value_dim": 24},
            (10, 0),
            "kv_lora_rank=24, qk_rope_head_dim=64: must be 512 and 64 or 256 and 64",
        ),
        ({"num_heads": 96}, (10, 0), "96 query heads on a rank: must be at most 64, or at least 128, over latent rows"),
        ({"num_heads": 16}, (12, 0), "16 query heads on a rank: must be 128 over latent rows on 12.x"),
        (
            {"num_heads": 128, "tree": True, "mode": Mode.VERIFY},
            (12, 0),
            "a tree's mask: over latent rows XQA gives no",
        ),
        ({"num_heads": 128}, (12, 0), None),
        ({"tree": True, "mode": Mode.VERIFY}, (10, 0), None),
        ({"tree": True, "mode": Mode.DRAFT_DECODE}, (10, 0), None),
    ],
)
def test_what_it_refuses_over_latent_rows(
    changes: dict[str, object], capability: tuple[int, int], reason: str | None
) -> None:
    use = dataclasses.replace(use_of(CHAINS[0], GEN, capability=capability), **changes)  # type: ignore[arg-type]
    found = limit(BACKENDS["trtllm"], use)
    assert found is None if reason is None else found is not None and found.startswith(reason), found
    assert found == trtllm_refusal(use)


def test_the_stand_in_has_the_library_s_arguments() -> None:
    """Where the library is installed."""
    mla = pytest.importorskip("flashinfer.mla", reason="flashinfer is not installed here")
    parameters = inspect.signature(mla.trtllm_batch_decode_with_kv_cache_mla).parameters
    required = tuple(name for name, parameter in parameters.items() if parameter.default is parameter.empty)
    assert required == REQUIRED and set(OPTIONAL) <= set(parameters)
