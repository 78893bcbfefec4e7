"""The references of `aerie.kernels.delta_rule`: against transformers', and against one token after the other."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aerie.kernels.delta_rule import tables
from aerie.kernels.delta_rule.chunks import stops
from aerie.kernels.delta_rule.formulas import advanced, block
from aerie.kernels.delta_rule.tables import DeltaHeads
from tests.support.kernels.delta_rule import SMALL, DeltaLives
from tests.support.slow import slow

transformers = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")


def _tokens(count: int) -> tuple[torch.Tensor, ...]:
    """q, k [1, count, 3, 8], normed, v [1, count, 3, 4], g and beta [1, count, 3], and a state."""
    torch.manual_seed(count)
    q, k = (torch.nn.functional.normalize(torch.randn(1, count, 3, 8), dim=-1) for _ in range(2))
    v, state = torch.randn(1, count, 3, 4), torch.randn(1, 3, 8, 4)
    return q, k, v, -torch.rand(1, count, 3), torch.rand(1, count, 3), state


@pytest.mark.parametrize("rule", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
@pytest.mark.parametrize("count", [1, 5, 64, 70])
def test_blocks_and_the_recurrence_are_those_of_transformers(rule: str, count: int) -> None:
    """In float32, as theirs computes; 2e-5 are sums of 70 terms whose rounding the solve repeats."""
    q, k, v, g, beta, state = _tokens(count)
    expected, last = getattr(transformers, rule)(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True)
    heads = [each.transpose(1, 2) for each in (q * 8**-0.5, k, v, g, beta)]
    o, _, _ = block(state, *heads, torch.ones(count, count, dtype=torch.bool).tril())
    torch.testing.assert_close(o.transpose(1, 2), expected, rtol=0, atol=2e-5)
    for i in range(count):
        state = advanced(state, k[:, i], v[:, i], g[:, i], beta[:, i])
    torch.testing.assert_close(state, last, rtol=0, atol=2e-5)


def test_padding_rows_are_finite_whatever_they_see() -> None:
    """Rows after a narrow tree keep the masks of a wider one: row 4 sees row 2, whose ancestor 1 it does not see."""
    *tokens, state = _tokens(5)
    q, k, v, g, beta = (each.transpose(1, 2) for each in tokens)
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    seen[4, 1] = seen[4, 3] = False
    g[..., 1] = -150.0
    o, added, _ = block(state, q, k, v, g, beta, seen)
    assert o.isfinite().all() and added.isfinite().all()
    o[..., 4, :] = added[..., 4, :] = 0.0
    seen[4, :4] = True
    expected, adds, _ = block(state, q, k, v, g, beta, seen)
    expected[..., 4, :] = adds[..., 4, :] = 0.0
    assert torch.equal(o, expected) and torch.equal(added, adds)


@pytest.mark.parametrize(
    "count,border,expected",
    [
        (1, -1, [1]),
        (64, 0, [64]),
        (65, 0, [64, 65]),
        (130, 10, [10, 74, 130]),
        (130, 130, [64, 128, 130]),
        (70, 64, [64, 70]),
    ],
)
def test_a_snapshot_ends_a_block(count: int, border: int, expected: list[int]) -> None:
    assert stops(count, border) == expected


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 30), heads=st.sampled_from([SMALL, DeltaHeads(1, 3, 8, 4), DeltaHeads(2, 2, 4, 8)]))
def test_random_lives_are_the_recurrence(seed: int, heads: DeltaHeads) -> None:
    """In float64, within 1e-10 of the largest number: chunks with snapshots, rounds of trees, any accepted path. Rounds
    of three rows or more replay before the layers."""
    rng = random.Random(seed)
    lives = DeltaLives(heads, torch.float64, rng, 1e-10, ahead=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tables, "MAX_TILE_ROWS", lives.path + 2)
        live(lives, rng)


def live(lives: DeltaLives, rng: random.Random) -> None:
    """Six steps of prompts and rounds, and a last round."""
    for _ in range(6):
        if len(lives.lives) < 2 or rng.random() < 0.3:
            slots = rng.sample(range(lives.slots), 2)
            for slot in slots:
                if rng.random() < 0.5 or len(lives.replayed.get(slot, [])) > 1:  # a new request
                    lives.lives.pop(slot, None)
                    lives.length.pop(slot, None)
            lives.run_chunks([(slot, rng.choice([0, 1, 2, 5, 63, 64, 65, 90])) for slot in slots], rng.randint(0, 2))
        else:
            alive = [slot for slot in lives.lives if rng.random() < 0.8]
            lives.run_round(alive, rng.randint(1, lives.width), rng.randint(0, 2) or not alive)
    if lives.lives:
        lives.finish()


@pytest.mark.parametrize("tokens", [120, *slow(300, 32_768)])
def test_states_do_not_drift(tokens: int) -> None:
    """Decoded with trees that are verified, against one token after the other in float64; a state forgets its errors
    as it forgets its tokens. The tolerance is that of any single round: the last norm enlarges the rounding of outputs
    that almost cancel. `pytest -m slow -s -k drift tests/kernels/delta_rule/test_delta_rule.py` prints the largest
    error."""
    lives = DeltaLives(SMALL, torch.float32, random.Random(tokens), 2e-4, slots=1)
    lives.run_chunks([(0, 70)])
    while lives.length[0] < 70 + tokens:
        lives.run_round([0], 4)
    lives.finish()
    print(f"{lives.length[0]} tokens: largest relative error {lives.worst:.1e}")
