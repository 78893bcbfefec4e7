"""Windows, soft caps, sinks and scales of layers against transformers' own attention functions and masks: chunks,
single rows, chains, trees and drafted levels. The torch backend on a CPU; the triton backend on a GPU, or under
Triton's interpreter (see `test_triton_interpreter`)."""

from typing import Any

import pytest
import torch
from torch import Tensor

from aerie.attention.registry import build_backend
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.kv.batches import DecodeBatch, Mode, PrefillBatch
from tests.support.kernels.triton_cases import random_pool, random_rows, random_table
from tests.support.kernels.triton_interpreter import DEVICE, INTERPRETED

GROUP, KV_HEADS, DIM, PAGE = 3, 2, 16, 4
HEADS = GROUP * KV_HEADS
LENGTH = 45 if INTERPRETED else 85
RULES = {
    "plain": ScoreRule(0.3),
    "window": ScoreRule(0.25, window=64),
    "window of a page": ScoreRule(0.25, window=4),
    "only itself": ScoreRule(0.25, window=1),
    "soft cap": ScoreRule(1.5, soft_cap=2.5),
    "sinks": ScoreRule(0.25, has_sinks=True),
    "gpt-oss": ScoreRule(0.25, window=7, has_sinks=True),
    "gemma-2": ScoreRule(0.7, window=33, soft_cap=50.0),
    "all": ScoreRule(0.7, window=20, soft_cap=1.0, has_sinks=True),
}
# A node's parent in a tree of seven, and another whose deepest path is longer than the smallest windows.
TREES = ((-1, 0, 0, 1, 3, 2, 3), (-1, 0, 1, 2, 3, 4, 5))
QUICK = ("all",)  # that the interpreter is asked by default
CASES = [
    pytest.param(name, rule, id=f"{name}-{title}", marks=marks)
    for title, rule in RULES.items()
    for name, marks in (
        ("torch", pytest.mark.skipif(INTERPRETED, reason="needs no interpreter")),
        ("triton", () if INTERPRETED and title in QUICK else pytest.mark.slow if INTERPRETED else pytest.mark.gpu),
    )
]


def eager(q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, sinks: Tensor | None, positions: Tensor) -> Tensor:
    """Attention by transformers, in float64, of rows q [n, heads, dim] at `positions` over k, v [length, kv_heads,
    dim]."""
    from transformers.masking_utils import sliding_window_causal_mask_function

    class Layer:
        num_key_value_groups, training = GROUP, False

    Layer.sinks = None if sinks is None else sinks.double()  # type: ignore[attr-defined]
    sees = sliding_window_causal_mask_function(rule.window or LENGTH + 9)
    places = torch.arange(k.shape[0], device=q.device)
    seen = torch.stack([sees(0, 0, position, places) for position in positions])
    mask = torch.zeros(seen.shape, dtype=torch.float64, device=q.device).masked_fill(~seen, float("-inf"))
    given = [x.double().transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    options: dict[str, Any] = {"scaling": rule.scale}
    if sinks is not None and rule.soft_cap is not None:  # no model of transformers has both
        scores = rule.soft_cap * torch.tanh(
            given[0] @ given[1].repeat_interleave(GROUP, 1).transpose(2, 3) * rule.scale / rule.soft_cap
        )
        both = torch.cat((scores + mask, sinks.double().view(1, -1, 1, 1).expand(-1, -1, q.shape[0], -1)), -1)
        return (both.softmax(-1)[..., :-1] @ given[2].repeat_interleave(GROUP, 1))[0].transpose(0, 1)
    if sinks is not None:
        from transformers.models.gpt_oss import modeling_gpt_oss

        return modeling_gpt_oss.eager_attention_forward(Layer, *given, mask, **options)[0][0]
    from transformers.models.gemma2 import modeling_gemma2

    torch_softmax = torch.nn.functional.softmax
    modeling_gemma2.nn.functional.softmax = lambda x, dim, dtype: torch_softmax(x, dim)  # float64, not float32
    try:
        return modeling_gemma2.eager_attention_forward(Layer, *given, mask, softcap=rule.soft_cap, **options)[0][0]
    finally:
        modeling_gemma2.nn.functional.softmax = torch_softmax


class Text:
    """A request of LENGTH tokens on scattered pages, with queries [LENGTH, heads, dim]."""

    def __init__(self, rule: ScoreRule) -> None:
        torch.manual_seed(LENGTH)
        self.rule = rule
        num_pages = -(-LENGTH // PAGE) + 6
        self.kv = random_pool(num_pages, PAGE, KV_HEADS, DIM, torch.float32).layer(0)
        self.table = random_table([LENGTH + 8], PAGE, num_pages)
        self.q = random_rows(LENGTH, HEADS, DIM, torch.float32)
        self.sinks = torch.randn(HEADS, device=DEVICE) * 3 if rule.has_sinks else None
        pages = self.table[0, : -(-LENGTH // PAGE)].long()
        self.k, self.v = (x[pages].flatten(0, 1)[:LENGTH] for x in (self.kv.k, self.kv.v))

    def ours(self, name: str, batch: DecodeBatch | PrefillBatch, q: Tensor) -> Tensor:
        mode = Mode.PREFILL if isinstance(batch, PrefillBatch) else batch.mode
        prepared = build_backend(name, mode).prepare(batch)
        other = ScoreRule(self.rule.scale, 11)  # a layer before this one leaves nothing that this one reads
        prepared.forward(q, self.kv, other)
        return prepared.forward(q, self.kv, self.rule, self.sinks)

    def expected(self, positions: list[int], q: Tensor, path: list[int]) -> Tensor:
        """Rows at `positions` of a text whose tokens are those at the places `path`."""
        where = torch.tensor(path, device=DEVICE)
        return eager(q, self.k[where], self.v[where], self.rule, self.sinks, torch.tensor(positions, device=DEVICE))


def assert_equal(out: Tensor, expected: Tensor) -> None:
    # float32 sums of up to 85 terms: 85 * 2^-24 relative; and 1e-7 of a soft cap's tanh, times a cap of 50
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name,rule", CASES)
def test_chunks_are_those_of_transformers(name: str, rule: ScoreRule) -> None:
    text = Text(rule)
    cuts = [0, 1, 38, LENGTH]
    counts = [end - start for start, end in zip(cuts[:-1], cuts[1:], strict=True)]
    batch = PrefillBatch.from_lists(cuts[:-1], counts, text.table.expand(3, -1), LENGTH + 2)
    out = text.ours(name, batch, torch.cat((text.q, text.q[:2])))
    everything = list(range(LENGTH))
    assert_equal(out[:LENGTH], text.expected(everything, text.q, everything))
    assert not out[LENGTH:].any()


@pytest.mark.parametrize("name,rule", CASES)
def test_rows_of_rounds_are_those_of_transformers(name: str, rule: ScoreRule) -> None:
    """Requests of several lengths with one row each, then the nodes of two trees, then the last level of one."""
    text = Text(rule)
    places = [0, 3, 4, 31, LENGTH - 22, LENGTH - 21, LENGTH - 1]
    mask = torch.ones((len(places), 1), dtype=torch.int64, device=DEVICE)
    table = text.table.expand(len(places), -1).contiguous()
    lengths = torch.tensor(places, dtype=torch.int32, device=DEVICE)
    batch = DecodeBatch(Mode.DECODE, 1, 1, lengths, mask, table, LENGTH)
    everything = list(range(LENGTH))
    assert_equal(text.ours(name, batch, text.q[places]), text.expected(places, text.q[places], everything))
    for parents in TREES:
        prefixes, paths = [2, LENGTH - 15], [path_of(node, parents) for node in range(len(parents))]
        masks = torch.tensor([[sum(1 << node for node in path) for path in paths]] * 2, device=DEVICE)
        for rows in (len(parents), 2):
            mode = Mode.VERIFY if rows == len(parents) else Mode.DRAFT_DECODE
            batch = DecodeBatch(
                mode,
                rows,
                len(parents),
                torch.tensor(prefixes, dtype=torch.int32, device=DEVICE),
                masks[:, -rows:],
                table[:2],
                prefixes[-1] + len(parents),
                chain=mode is Mode.VERIFY and parents == TREES[1],
            )
            nodes = range(len(parents) - rows, len(parents))
            q = torch.cat([text.q[[prefix + node for node in nodes]] for prefix in prefixes])
            out = text.ours(name, batch, q).view(2, rows, HEADS, DIM)
            for prefix, ours, queries in zip(prefixes, out, q.view(2, rows, HEADS, DIM), strict=True):
                for node, row, query in zip(nodes, ours, queries, strict=True):
                    path = [*range(prefix), *(prefix + each for each in paths[node])]
                    assert_equal(row[None], text.expected([len(path) - 1], query[None], path))


def path_of(node: int, parents: tuple[int, ...]) -> list[int]:
    return [] if node < 0 else [*path_of(parents[node], parents), node]
