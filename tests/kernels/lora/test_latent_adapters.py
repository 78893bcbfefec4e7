"""Adapters of MLA's up-projection: products head by head are those with the merged weight, and prompt chunks in
expanded form are those in absorbed form. On a GPU, or under Triton's interpreter, which
`tests/kernels/test_triton_interpreter.py` starts in a process of its own."""

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed here")

from aerie.attention.backends.triton_backend import TritonBackend, TritonExpandedChunks  # noqa: E402
from aerie.attention.kv_cache.layout import LatentLayout  # noqa: E402
from aerie.kernels.kv.batches import Mode, PrefillBatch  # noqa: E402
from aerie.kernels.span import Span  # noqa: E402
from aerie.workers.layers.forward_context import ForwardContext, make_context  # noqa: E402
from aerie.workers.layers.latent_attention import LatentUpProjection  # noqa: E402
from aerie.workers.lora import latent  # noqa: E402
from aerie.workers.lora.latent import LatentAdapters, allocate_latent_tables, launch_head_products  # noqa: E402
from aerie.workers.lora.layers import AdapterRows  # noqa: E402
from tests.kernels.attend.test_latent_kernels import random_angles, random_attention, with_kernels  # noqa: E402
from tests.support.kernels.attention_cases import uniform_pool  # noqa: E402
from tests.support.kernels.triton_cases import random_decode, random_table  # noqa: E402
from tests.support.kernels.triton_interpreter import DEVICE, MARKS, kernels_of_operations  # noqa: E402

pytestmark = MARKS
LORAS, RANK = 3, 16


def adapted(layer: LatentUpProjection, of_slot: list[int], is_fixed: bool = False) -> AdapterRows:
    """Give a layer random adapters. of_slot: each slot's adapter."""
    generator = torch.Generator().manual_seed(3)
    tables = allocate_latent_tables(layer.shape, LORAS, RANK, torch.float32, torch.device(DEVICE))
    for table in (tables.down, tables.up):
        table.copy_(torch.randn(table.shape, generator=generator) * 0.3)
    index = AdapterRows(torch.tensor(of_slot, device=DEVICE), is_fixed)
    layer.head_adapters = LatentAdapters(layer, tables, index)
    return index


def merged(layer: LatentUpProjection, adapter: int) -> Tensor:
    """[heads, key_dim + value_dim, latent], with one adapter; -1: none."""
    weight = layer.keys_and_values
    if adapter >= 0:
        head = cast(LatentAdapters, layer.head_adapters)
        ranks = slice(adapter * RANK, (adapter + 1) * RANK)
        weight = weight + head._up[:, ranks] @ head._down[ranks]
    return weight.view(layer.num_heads, -1, weight.shape[1])


@pytest.mark.parametrize(("max_bytes", "is_fixed"), [(1 << 26, False), (1, False), (1, True)])
def test_products_by_head_are_those_of_the_merged_weight(
    max_bytes: int, is_fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, in blocks of 16 rows, and as in deterministic engines."""
    monkeypatch.setattr(latent, "_MAX_INNER_BYTES", max_bytes)
    monkeypatch.setattr(latent, "_MAX_FIXED_RANKS", 20)
    layer = LatentUpProjection(24, Span(2, 5, 8), 12, 20).to(DEVICE)
    layer.method.fill_dummy(torch.Generator(DEVICE).manual_seed(1))
    layer.keys_and_values, layer.deterministic = cast(Any, layer.method).weight, False
    by_head = layer.keys_and_values.view(3, 32, 24)
    layer.keys, layer.values = by_head[:, :12], by_head[:, 12:].transpose(1, 2)
    index = adapted(layer, [2, -1, 0, 1], is_fixed)
    generator = torch.Generator().manual_seed(0)
    slots = torch.randint(0, 4, (37,), generator=generator, dtype=torch.int32).to(DEVICE)
    chunks = SimpleNamespace(batch=SimpleNamespace(slots=slots[:3].long()), token_chunks=torch.tensor([0, 0, 2, 1]))
    fields: dict[str, Any] = {"row_slots": slots, "last": None, "attending_rows": lambda each: each, "expanded": chunks}
    index.enter(cast(ForwardContext, SimpleNamespace(**fields)), True)
    shapes = (30, 3, 12), (30, 3, 24), (4, 24)
    q, out, latents = (torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes)
    absorbed, values = torch.zeros(30, 3, 24 + 8, device=DEVICE), torch.zeros(30, 3, 20, device=DEVICE)
    with kernels_of_operations() if is_fixed else nullcontext():
        layer.adapters.add_keys(torch.cat((q, q[..., :8]), 2), absorbed, 37)  # type: ignore[union-attr]
        layer.adapters.add_values(out, values, 37)  # type: ignore[union-attr]
    kv = torch.zeros(4, 96, device=DEVICE)
    if not is_fixed:
        layer.adapters.add_expanded(latents, kv)  # type: ignore[union-attr]
    of_rows = [[2, -1, 0, 1][slot] for slot in slots.tolist()]
    for row, adapter in enumerate(of_rows[:30]):
        change = merged(layer, adapter) - merged(layer, -1)
        torch.testing.assert_close(absorbed[row, :, :24], torch.einsum("hk,hkl->hl", q[row], change[:, :12]))
        torch.testing.assert_close(values[row], torch.einsum("hl,hvl->hv", out[row], change[:, 12:]))
    assert (absorbed[..., 24:] == 0).all() and -1 in of_rows
    for token, chunk in enumerate(() if is_fixed else (0, 0, 2, 1)):
        change = merged(layer, of_rows[chunk]) - merged(layer, -1)
        torch.testing.assert_close(kv[token].view(3, 32), change @ latents[token])
    index.enter(cast(ForwardContext, SimpleNamespace(**fields)), False)
    assert layer.adapters is None


def test_chunks_in_expanded_form_have_the_adapters_of_their_requests() -> None:
    """Two chunks, one of which goes on after others' tokens, and padding; beside rounds."""
    torch.manual_seed(8)
    layer, backend = random_attention(24), TritonBackend()
    index = adapted(layer.kv_b_proj, [2, -1, 0, 1, -1])
    table = random_table([7, 14, 1], 4, 40)
    chunks = PrefillBatch.from_lists((0, 9), (7, 5), table, 14)
    chunks = dataclasses.replace(chunks, slots=torch.tensor([2, 3, 4], device=DEVICE))
    decode = random_decode(Mode.VERIFY, 3, 3, [9, 0], 4, 40)
    decode = dataclasses.replace(decode, slots=torch.tensor([0, 1], device=DEVICE))
    x, angles = torch.randn((20, 32), device=DEVICE), random_angles(20, 16)
    history, results = torch.randn((41, 4, 48), device=DEVICE), list[Tensor]()
    for expands, is_active in ((True, True), (False, True), (False, False)):
        pool = uniform_pool(1, 40, 4, LatentLayout(32, 16, torch.float32), DEVICE)
        pool.tensors[0][0][0] = history
        context = make_context(pool, {Mode.VERIFY: backend, Mode.PREFILL: backend}, decode, None, chunks)
        context = dataclasses.replace(context, expanded=TritonExpandedChunks(chunks, 4) if expands else None)
        index.enter(context, is_active)
        results.append(with_kernels(layer, layer.qkv_a(x), angles, context)[:18])
    torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=1e-4)
    changed = (results[1] != results[2]).any(1).tolist()
    assert changed == [True] * 3 + [False] * 3 + [True] * 12, "the second request has no adapter"
    launch_head_products(torch.nn.ModuleList([layer]))
