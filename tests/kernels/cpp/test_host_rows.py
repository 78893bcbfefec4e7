"""The C++ norms, gates, RoPE and attention for CPUs against their references."""

import pytest
import torch

from aerie.kernels.attend import references
from aerie.kernels.attend import rounds_cpp as attention
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.capability import Capability
from aerie.kernels.cpp_library import compiles
from aerie.kernels.kv.batches import DecodeBatch, LayerKV, Mode
from aerie.kernels.norm.norm import add_rms_norm, rms_norm, silu_mul
from aerie.kernels.operation import Operation
from aerie.kernels.rope.rope_store import Angles, rope_store

pytestmark = pytest.mark.skipif(not compiles(Capability.of(torch.device("cpu"))), reason="no C++ compiler")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(580)


def test_the_operations_run_in_cpp() -> None:
    operations: tuple[Operation[..., object], ...] = (rms_norm, add_rms_norm, silu_mul, rope_store)
    for each in operations:
        assert each.serving(Capability.of(torch.device("cpu")))[0].name == "c++"


@pytest.mark.parametrize("size", [1, 7, 64, 577])
def test_norms(size: int, generator: torch.Generator) -> None:
    x, residual, weight = (torch.randn(*shape, generator=generator) for shape in ((5, size), (5, size), (size,)))
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), rms_norm.reference(x, weight, 1e-5), rtol=1e-5, atol=1e-6)
    own, theirs = residual.clone(), residual.clone()
    expected = add_rms_norm.reference(x, theirs, weight, 1e-5)
    torch.testing.assert_close(add_rms_norm(x, own, weight, 1e-5), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(own, theirs)


def test_gates_also_of_huge_and_of_bad_numbers(generator: torch.Generator) -> None:
    x = torch.randn(3, 2 * 77, generator=generator) * 10
    x[0, :5] = torch.tensor([1e30, -1e30, float("inf"), 80.0, -80.0])
    x[1, 70] = float("nan")
    torch.testing.assert_close(silu_mul(x), silu_mul.reference(x), rtol=1e-5, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("rotated", [8, 24])
def test_rope_and_the_write_of_keys_and_values(rotated: int, generator: torch.Generator) -> None:
    rows, heads, kv_heads, size = 6, 6, 2, 24
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * size, generator=generator).unflatten(1, (-1, size))
    qkv[2, heads + kv_heads, 3] = float("nan")
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    tables = (torch.randn(50, rotated // 2, generator=generator) for _ in range(2))
    angles = Angles(*tables, torch.tensor([3, 49, 0, 7, 7, 1]))
    slots = torch.tensor([9, 4, 13, 0, 2, 15])
    found = []
    for run in (rope_store, rope_store.reference):
        kv = LayerKV(torch.zeros(4, 4, kv_heads, size), torch.zeros(4, 4, kv_heads, size))
        found.append((run(q.clone(), k, v, angles, kv, slots), kv.k, kv.v))
    for own, expected in zip(*found, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def _pages(generator: torch.Generator, size: int = 40) -> LayerKV:
    return LayerKV(*(torch.randn(12, 16, 2, size, generator=generator) for _ in range(2)))


def _batch(rows: int, mask: list[list[int]], window: int | None = None) -> DecodeBatch:
    table = torch.tensor([[3, 1, 7, 5], [2, 8, 0, 0], [6, 11, 9, 4]], dtype=torch.int32)
    prefix = torch.tensor([50, 3, 41], dtype=torch.int32)
    return DecodeBatch(Mode.VERIFY, rows, rows, prefix, torch.tensor(mask), table, 50 + rows, window=window)


@pytest.mark.parametrize("window", [None, 9, 200])
def test_attention_of_single_rows(window: int | None, generator: torch.Generator) -> None:
    kv, q, rule = _pages(generator), torch.randn(3, 6, 40, generator=generator), ScoreRule(0.3, window)
    batch = _batch(1, [[1]] * 3, window)
    assert attention.serves(q, kv, rule, window, 1)
    own = attention.attend_rounds(q, kv, batch, rule.scale)
    torch.testing.assert_close(own.double(), references.decode(q, kv, batch, rule), rtol=1e-5, atol=1e-5)


def test_attention_of_trees_is_that_of_single_rows(generator: torch.Generator) -> None:
    """Rows of a path see what single rows see one after the other, so their results are equal bit for bit."""
    kv, q, rule = _pages(generator), torch.randn(9, 6, 40, generator=generator), ScoreRule(0.3)
    tree = _batch(3, [[0b001, 0b011, 0b101]] * 3)
    kv.k[5, 5:] = float("nan")  # beyond request 0's 53 positions; masked keys and values may be anything
    own = attention.attend_rounds(q, kv, tree, rule.scale)
    kv.k[5, 5:] = 0.0
    torch.testing.assert_close(own.double(), references.decode(q, kv, tree, rule), rtol=1e-5, atol=1e-5)
    alone = attention.attend_rounds(q[[0, 3, 6]].contiguous(), kv, _batch(1, [[1]] * 3), rule.scale)
    assert torch.equal(own[[0, 3, 6]], alone)


def test_nan_of_a_seen_key_makes_a_row_nan_and_no_other(generator: torch.Generator) -> None:
    kv, q = _pages(generator), torch.randn(3, 6, 40, generator=generator)
    kv.k[1, 5, 0, 0] = float("nan")  # request 0, first KV head
    own = attention.attend_rounds(q, kv, _batch(1, [[1]] * 3), 0.3)
    assert bool(own[0, :3].isnan().all()) and not bool(own[0, 3:].isnan().any()) and not bool(own[1:].isnan().any())


def test_other_rules_stay_with_torch(generator: torch.Generator) -> None:
    kv, q = _pages(generator), torch.randn(3, 6, 40, generator=generator)
    assert not attention.serves(q, kv, ScoreRule(0.3, soft_cap=30.0), None, 1)
    assert not attention.serves(q, kv, ScoreRule(0.3, has_sinks=True), None, 1)
    assert not attention.serves(q, kv, ScoreRule(0.3, 8), 8, 3)
    assert not attention.serves(q.bfloat16(), kv, ScoreRule(0.3), None, 1)
