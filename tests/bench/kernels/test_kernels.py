"""The benchmarks of kernels run on a CPU with torch's operations and a clock that stands still: their cases, the shapes
that they make and the tables that they print. Their figures need a GPU."""

import json
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from aerie.attention.backend import AttentionBackend
from aerie.attention.registry import build_backend
from aerie.kernels.delta_rule.chunks import delta_rule_chunks
from aerie.kernels.delta_rule.tables import DeltaHeads
from aerie.kernels.experts.route import Routing
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.kv.batches import Mode
from aerie.kernels.norm.norm import silu_mul
from aerie.kernels.packed.weight import PackedWeight, dequantize
from tests.bench.kernels import attention, delta_chunks, delta_rule, latent_attention, linear, packed, packed_experts

COPY_RATE = 4e12


class StillClock:
    """As `Clock`: every run takes 10 us."""

    def __init__(self, rounds: int) -> None:
        self.source = torch.empty(1)

    def medians(self, *runs: Callable[[], object]) -> tuple[list[float], float]:
        for run in runs:
            run()
        return [10.0] * len(runs), COPY_RATE


def _with_torch(name: str, mode: Mode) -> AttentionBackend:
    return build_backend("torch", mode)


def _memory(gigabytes: int) -> Tensor:
    return torch.randn(1 << 24, dtype=torch.bfloat16)


def _run(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str) -> dict:
    """Return what `bench` prints last."""
    monkeypatch.setattr(bench, "Clock", StillClock, raising=False)
    monkeypatch.setattr(bench, "captured", lambda run: SimpleNamespace(replay=run), raising=False)
    monkeypatch.setattr(sys, "argv", ["bench", *options])
    bench.main()
    result: dict = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["commit"] and result["hardware"] == "CPU"
    return result


def test_attention_measures_every_mode(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {
        "build_backend": _with_torch,
        "random_memory": _memory,
        "MAX_PREFIX": 128,
        "MAX_LAYERS": 4,
        "NAMES": ("torch",),
        "is_served": lambda *_: True,
        "find_spec": lambda _: None,
        "CHUNKS": ((2, 24, 0), (1, 16, 40)),
    }.items():
        monkeypatch.setattr(attention, name, value)
    options = ("--batches", "2", "--widths", "1", "4", "--contexts", "48")
    result = _run(attention, monkeypatch, capsys, *options)
    assert [case["work"] for case in result["prompts"]] == ["prompts at 0", "prompts at 40"]
    works = [case["work"] for case in result["decoding"]]
    assert works == ["decode", "verify", "draft_extend", "draft_decode, chain", "draft_decode, tree"]
    one = result["decoding"][0]
    assert one["us"] == {"torch": pytest.approx(10 / 4, abs=0.01)}, "a pass of four layers"
    assert one["floor"] == round(2 * (48 + 1) * 4096 / COPY_RATE * 1e6, 2)
    window = ("--heads", "4", "--kv-heads", "2", "--dim", "16", "--window", "20")
    result = _run(attention, monkeypatch, capsys, "--batches", "100", "--widths", "4", "--contexts", "48", *window)
    assert result["layer"] == {"heads": 4, "kv_heads": 2, "dim": 16, "window": 20} and result["prompts"] == []
    floors = {case["work"]: case["floor"] for case in result["decoding"]}
    sees = {"decode": 20, "verify": 23}  # of the second, four rows
    assert all(floors[work] == round(100 * keys * 128 / COPY_RATE * 1e6, 2) for work, keys in sees.items())


def test_latent_attention_tells_the_share_of_a_copy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "build_backend": _with_torch,
        "random_memory": _memory,
        "MAX_PREFIX": 128,
        "MAX_LAYERS": 4,
        "find_spec": lambda _: None,
    }.items():
        monkeypatch.setattr(latent_attention, name, value)
    options = ("--batches", "2", "--widths", "4", "--contexts", "32", "--heads", "4")
    (found,) = _run(latent_attention, monkeypatch, capsys, *options)["results"]
    num_bytes = 2 * (32 + 4) * (512 + 64) * 2
    assert found["triton_us"] == pytest.approx(10 / 4, abs=0.01)
    assert found["triton_share"] == pytest.approx(num_bytes / COPY_RATE / (10 / 4 * 1e-6), abs=2e-3)


def test_linear_layers_of_each_weight(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    products = (linear.Product("q", 256, 128), linear.Product("gate and up", 512, 128, gated=True))
    monkeypatch.setattr(linear, "PRODUCTS", products)
    monkeypatch.setattr(linear, "GEMMOptions", lambda *_, **__: GEMMOptions())
    before = torch.get_default_dtype()
    try:
        results = _run(linear, monkeypatch, capsys, "--rows", "1", "3")["results"]
    finally:
        torch.set_default_dtype(before)
    assert [(row["product"], row["weights"], row["rows"]) for row in results] == [
        (product.name, weights, rows) for product in products for weights in ("bf16", "fp8", "w4a16") for rows in (1, 3)
    ]
    assert all(row["us"] == round(10 / linear.MAX_WEIGHTS, 2) for row in results)


def test_products_of_few_bits_in_every_tiling(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong results are marked, and gated products need pairs of blocks."""
    shapes = linear.Product("8B o", 64, 256), linear.Product("8B gate and up", 128, 256, gated=True)
    monkeypatch.setattr(packed, "SHAPES", {shape.name: shape for shape in shapes})

    def reference(name: str, product: linear.Product, _: object, rows: int) -> packed.Multiply | None:
        if name != packed.TODAY and product.gated and not packed.VARIANTS[name].paired:
            return None

        def multiply(x: Tensor, weight: PackedWeight) -> Tensor:
            y = x.float() @ dequantize(weight, torch.float32).T
            return (silu_mul(y) if product.gated else y) * (1.1 if name == "128 outputs, ordered rows" else 1.0)

        return multiply

    monkeypatch.setattr(packed, "multiply_of", reference)
    before = torch.get_default_dtype()
    try:
        results = _run(packed, monkeypatch, capsys, "--rows", "1", "40")["results"]
    finally:
        torch.set_default_dtype(before)
    found = {(row["shape"], row["variant"]) for row in results}
    assert {name for shape, name in found if shape == "8B o"} == {packed.TODAY, *packed.VARIANTS}
    unpaired = {name for name, variant in packed.VARIANTS.items() if not variant.paired}
    assert {name for shape, name in found if shape == "8B gate and up"} == {packed.TODAY, *packed.VARIANTS} - unpaired
    assert {row["variant"] for row in results if "WRONG" in row["error"]} == {"128 outputs, ordered rows"}
    assert all(row["us"] == round(10 / 16, 2) for row in results)


def test_the_delta_rule_in_rounds_and_chunks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(delta_rule, "MODELS", {"27B": DeltaHeads(1, 2, 16, 16)})
    monkeypatch.setattr(delta_rule, "MAX_LAYERS", 3)
    options = ("--models", "27B", "--batches", "2", "--widths", "1", "4", "--tokens", "70")
    results = _run(delta_rule, monkeypatch, capsys, *options)["results"]
    assert [(row["work"], row["batch"], row["size"]) for row in results] == [
        ("round", 2, 1),
        ("round", 2, 4),
        ("chunk", 1, 70),
    ]
    num_bytes = 2 * 2 * 2 * 16 * 16 * 4
    assert results[0]["us"] == pytest.approx(10 / 3, abs=0.01) and results[0]["gb_per_s"] == round(
        num_bytes / (10 / 3) / 1e3
    )


class OffInTheSecondRun:
    """`delta_rule_chunks`, whose second run is wrong in one row of one head's state."""

    reference = staticmethod(delta_rule_chunks.reference)
    runs = 0

    def __call__(self, *operands: Any) -> None:
        self.reference(*operands)
        self.runs += 1
        state = operands[2].state
        state[2, 0, 6] += state.abs().max() / 4 if self.runs == 2 else 0


def test_equal_runs_of_chunks_are_compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(delta_chunks, "GROUPS", (DeltaHeads(1, 2, 16, 16),))
    monkeypatch.setattr(delta_chunks, "QWEN", DeltaHeads(1, 2, 16, 32))
    monkeypatch.setattr(delta_chunks, "delta_rule_chunks", OffInTheSecondRun())
    results = _run(delta_chunks, monkeypatch, capsys, "--models", "--runs", "3")["results"]["equality"]
    assert [row["different"] for row in results] == [1, 0, 0, 0]
    assert results[0]["state"] > 0.1 > results[0]["out"] == results[1]["state"] == 0


def test_experts_of_few_bits_are_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = packed_experts.Model(64, 64, Routing(4, 2, normalise=True), "e2m1", 32, packed_experts.GPT_OSS, True)
    monkeypatch.setitem(packed_experts.MODELS, "gpt-oss-20b", small)
    result = _run(packed_experts, monkeypatch, capsys, "--rows", "1", "20")
    one, many = result["results"]
    assert one["distinct"] == 2 and many["distinct"] == 4
    # of each expert 192 x 64 codes of 4 bits and as many scales of 16 bits as blocks of 32
    assert one["mb"] == round(2 * 192 * 64 * (0.5 + 2 / 32) / 1e6, 1) and one["experts_us"] == round(10 / 9, 2)
