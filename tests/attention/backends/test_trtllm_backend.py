"""The trtllm backend's calls of FlashInfer, recorded by a stand-in: no GPU, no package. Results on Hopper are
compared by `test_backend_conformance`; Blackwell's kernels are tested here alone."""

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from aerie.attention.backends.trtllm_backend import mask_words
from aerie.attention.registry import build_backend
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.kv.batches import DecodeBatch, Mode, causal_mask
from tests.support.kernels.attention_cases import (
    LENGTHS,
    WORKS,
    Shape,
    decode_batch,
    num_pages,
    random_pool,
    random_rows,
)

CPU = torch.device("cpu")
META = torch.device("meta")
WORK = {work.name: work for work in WORKS}
Calls = list[dict[str, Any]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made: Calls = []

    def attend(**arguments: Any) -> Tensor:
        made.append(arguments)
        return torch.empty_like(arguments["query"])

    module = types.ModuleType("flashinfer.decode")
    module.trtllm_batch_decode_with_kv_cache = attend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.decode", module)
    on_capability(monkeypatch, 9)
    return made


def on_capability(monkeypatch: pytest.MonkeyPatch, major: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))


def attend(batch: DecodeBatch, calls: Calls) -> dict[str, Any]:
    """The arguments of one layer's call."""
    shape, device = Shape(), batch.prefix_len.device
    kv = random_pool(shape, num_pages(16, 16), device).layer(0)
    q = random_rows(batch.num_rows, shape, device)
    out = build_backend("trtllm", batch.mode).prepare(batch).forward(q, kv, ScoreRule(0.125))
    assert out.shape == q.shape and out.is_contiguous()
    return calls[-1]


@pytest.mark.parametrize(
    "name", [work.name for work in WORKS if work.mode is not Mode.PREFILL and work.name != "draft_decode a tree"]
)
def test_lengths_are_totals_with_the_rows_of_the_pass(name: str, calls: Calls) -> None:
    work = WORK[name]
    batch = decode_batch(work, Shape(), LENGTHS[0], CPU)
    given = attend(batch, calls)
    assert given["seq_lens"].dtype == torch.int32
    assert given["seq_lens"].tolist() == [n + work.suffix_len for n in LENGTHS[0]]
    assert int(given["seq_lens"].min()) >= given["q_len_per_req"] == work.rows  # padding rows too
    assert given["block_tables"] is batch.page_table and given["max_seq_len"] == 4096
    assert given["query"].is_contiguous() and (given["backend"], given["kv_layout"]) == ("xqa", "NHD")
    assert given["bmm1_scale"] == 0.125 and (given["mask"] is None) == (work.rows == 1)


def test_a_tree_s_mask_is_its_rows_words(calls: Calls) -> None:
    batch = decode_batch(WORK["verify a tree"], Shape(), LENGTHS[0], CPU)
    mask = attend(batch, calls)["mask"]
    assert mask.dtype == torch.uint16 and mask.shape == (7, 6, 2)
    assert torch.equal(mask[..., 0].long(), batch.mask) and not mask[..., 1].long().any()


def test_a_path_is_causal_whatever_its_batch_carries(calls: Calls) -> None:
    batch = decode_batch(WORK["draft_extend"], Shape(), LENGTHS[0], CPU)
    assert attend(batch, calls)["mask"][3, :, 0].tolist() == [1, 3, 7, 15, 31, 63]


def test_masks_are_written_in_place_once_a_pass(calls: Calls) -> None:
    backend = build_backend("trtllm", Mode.VERIFY)
    kv = random_pool(Shape(), num_pages(16, 16), CPU).layer(0)
    for _ in range(2):
        batch = decode_batch(WORK["verify a tree"], Shape(), LENGTHS[0], CPU)
        prepared = backend.prepare(batch)
        for _ in range(2):
            prepared.forward(random_rows(batch.num_rows, Shape(), CPU), kv, ScoreRule(1.0))
        assert torch.equal(calls[-1]["mask"][..., 0].long(), batch.mask)
    assert len({call["mask"].data_ptr() for call in calls}) == 1
    assert len({call["workspace_buffer"].data_ptr() for call in calls}) == 1
    assert not calls[0]["workspace_buffer"].any()


@pytest.mark.parametrize("rows,words", [(2, 2), (32, 2), (33, 4), (63, 4)])
def test_rows_of_a_mask_fill_whole_pairs_of_words(rows: int, words: int) -> None:
    mask = torch.randint(0, 1 << min(rows, 62), (3, rows))
    packed = mask_words(mask)
    assert packed.shape == (3, rows, words)
    assert torch.equal(sum(packed[..., w].long() << 16 * w for w in range(words)), mask)


@pytest.mark.parametrize("name", ["decode", "verify a chain", "verify a tree", "draft_extend", "draft_decode a chain"])
def test_nothing_of_a_round_is_read_on_the_host(name: str, calls: Calls) -> None:
    """On the meta device there is no value to read."""
    attend(decode_batch(WORK[name], Shape(), LENGTHS[0], META), calls)


def test_a_draft_tree_is_refused_by_name(calls: Calls) -> None:
    with pytest.raises(ValueError, match="draft_decode with 3 rows that see 9 columns; its masks are as wide as"):
        attend(decode_batch(WORK["draft_decode a tree"], Shape(), LENGTHS[0], CPU), calls)


def test_prompt_chunks_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'trtllm': cannot do prefill; it does decode, .* only"):
        build_backend("trtllm", Mode.PREFILL)


@pytest.mark.parametrize("name", ["decode", "verify a chain", "draft_extend", "draft_decode a chain"])
def test_blackwell_gets_its_own_kernels_without_masks(name: str, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    on_capability(monkeypatch, 10)
    work = WORK[name]
    given = attend(decode_batch(work, Shape(), LENGTHS[0], CPU), calls)
    assert given["backend"] == "trtllm-gen" and given["mask"] is None and given["q_len_per_req"] == work.rows
    counters = given["multi_ctas_kv_counter_buffer"]
    assert counters.dtype == torch.uint8 and not counters.any()
    assert counters.numel() >= 4 * 256 * 128  # four bytes for each of 256 requests' 128 heads


def test_a_causal_mask_has_no_memory_per_request() -> None:
    assert causal_mask(100, 4, CPU).stride(0) == 0
