"""The triton backend with a span: a row's bits are a function of its path alone. On a GPU, or small cases under
Triton's interpreter, see `test_triton_backend`."""

import dataclasses
from itertools import pairwise

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the triton backend needs triton, which is not installed here")

from aerie.attention.backends.triton_backend import FIXED_SPAN, TritonBackend, fixed_span, list_pieces  # noqa: E402
from aerie.attention.kv_cache.pool import KVPool  # noqa: E402
from aerie.kernels.attend import decode_plan_triton, references, split_kv_triton  # noqa: E402
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.kv.batches import DecodeBatch, Mode, PrefillBatch, causal_mask  # noqa: E402
from tests.attention.backends.test_triton_prefill import check_prefill  # noqa: E402
from tests.support.kernels.triton_cases import (  # noqa: E402
    assert_close,
    random_decode,
    random_pool,
    random_rows,
    random_table,
)
from tests.support.kernels.triton_interpreter import DEVICE, INTERPRETED, MARKS  # noqa: E402

pytestmark = MARKS

SPAN = 128 if INTERPRETED else FIXED_SPAN
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
GROUP, KV_HEADS, HEAD_DIM, PAGE = (4, 1, 16, 16) if INTERPRETED else (4, 8, 128, 16)
SCALE = HEAD_DIM**-0.5
PLAIN = ScoreRule(SCALE)
# The second hides columns of a suffix's own path.
RULES = [PLAIN, ScoreRule(SCALE, 3, has_sinks=True), ScoreRule(SCALE, 100, soft_cap=1.0, has_sinks=True)]
# of a request and its suffix: short, at a tile's end and a span's, one of which the suffix reaches across
PREFIXES = [0, 1, 57, SPAN - 3, SPAN + 60] if INTERPRETED else [0, 1, 61, 640, 1021, 1023, 1024, 2047, 5000]


class Text:
    """One request's pages and queries, of which any rows may be computed: `q` [length, heads, head_dim]."""

    def __init__(self, length: int, rule: ScoreRule = PLAIN) -> None:
        self.rule = rule
        num_pages = -(-length // PAGE) + 5
        self.pool = random_pool(num_pages, PAGE, KV_HEADS, HEAD_DIM, DTYPE)
        self.table = random_table([length], PAGE, num_pages)
        self.q = random_rows(length, GROUP * KV_HEADS, HEAD_DIM, DTYPE)

    def plain(self, position: int) -> Tensor:
        """The row at `position`, in a pass of its own."""
        return self.chain(position, 1)

    def chain(self, prefix: int, rows: int) -> Tensor:
        mode = Mode.DECODE if rows == 1 else Mode.VERIFY
        length = torch.tensor([prefix], dtype=torch.int32, device=DEVICE)
        batch = DecodeBatch(mode, rows, rows, length, causal_mask(1, rows, DEVICE), self.table, prefix + rows)
        return attend(self.pool, batch, self.q[prefix : prefix + rows], rule=self.rule)

    def chunks(self, cuts: list[int]) -> Tensor:
        """All rows, as the chunks between `cuts` in one batch."""
        starts, counts = cuts[:-1], [end - start for start, end in pairwise(cuts)]
        batch = PrefillBatch.from_lists(starts, counts, self.table.expand(len(starts), -1))
        return attend(self.pool, batch, self.q)


def attend(
    pool: KVPool,
    batch: DecodeBatch | PrefillBatch,
    q: Tensor,
    backend: TritonBackend | None = None,
    rule: ScoreRule = PLAIN,
) -> Tensor:
    return (backend or TritonBackend(SPAN)).prepare(batch).forward(q, pool.layer(0), rule, sinks_of(rule))


def sinks_of(rule: ScoreRule) -> Tensor | None:
    return torch.linspace(-1.0, 2.0, GROUP * KV_HEADS, device=DEVICE) if rule.has_sinks else None


def test_spans_hold_the_longest_context() -> None:
    for length, span in ((2, 1024), (8192, 1024), (32768, 1024), (32769, 2048), (131072, 4096)):
        assert fixed_span(length) == span
        assert span * decode_plan_triton.MAX_SPLITS >= 2 * length


def test_contexts_are_cut_at_the_same_places_in_every_batch() -> None:
    prefix = torch.tensor([0, 99, 100, 356], dtype=torch.int32, device=DEVICE)
    for max_kv_len in (358, 700):
        items = split_kv_triton.plan_spans(prefix, 1, 100, max_kv_len)
        used = [row[:6] for row in items.items.tolist() if row[0] != split_kv_triton.IDLE.value]
        each = -(-max_kv_len // 100)
        assert [row[:3] for row in used] == [
            [0, 0, 1],
            [1, 0, 100],
            [2, 0, 100],
            [2, 100, 101],
            [3, 0, 100],
            [3, 100, 200],
            [3, 200, 300],
            [3, 300, 357],
        ]
        assert [row[5] for row in used] == [1, 1, 2, 2, 4, 4, 4, 4]
        assert [row[3] - row[4] for row in used] == [0, 0, 0, 1, 0, 1, 2, 3]
        assert items.requests.tolist() == [[0, 1], [each, 1], [2 * each, 2], [3 * each, 4]]


@pytest.mark.parametrize("rows,suffix_len", [(1, 1), (5, 9)] if INTERPRETED else [(1, 1), (4, 4), (5, 9), (21, 21)])
@pytest.mark.parametrize("mode", [Mode.VERIFY, Mode.DRAFT_EXTEND])
@pytest.mark.parametrize("window", [None, 100])
def test_attention_is_right(rows: int, suffix_len: int, mode: Mode, window: int | None) -> None:
    torch.manual_seed(rows)
    num_pages = sum(-(-(n + suffix_len) // PAGE) for n in PREFIXES) + 3
    pool = random_pool(num_pages, PAGE, KV_HEADS, HEAD_DIM, DTYPE)
    batch = random_decode(mode, rows, suffix_len, PREFIXES, PAGE, num_pages, window)
    q = random_rows(batch.num_rows, GROUP * KV_HEADS, HEAD_DIM, DTYPE)
    assert_close(attend(pool, batch, q), references.decode(q, pool.layer(0), batch, ScoreRule(SCALE)), DTYPE)


@pytest.mark.parametrize("rows", [4] if INTERPRETED else [2, 4, 8])
def test_rows_of_a_chain_equal_rows_of_their_own(rows: int) -> None:
    torch.manual_seed(7)
    for prefix in PREFIXES:
        text = Text(prefix + rows)
        together = text.chain(prefix, rows)
        for row in range(rows):
            assert torch.equal(together[row], text.plain(prefix + row)[0]), (prefix, row)


@pytest.mark.parametrize("rule", RULES, ids=["plain", "narrow, sinks", "window, cap, sinks"])
def test_rows_of_a_tree_equal_those_of_their_path(rule: ScoreRule) -> None:
    """Path 0, 2, 3, 7 of a tree of 9 nodes, the others being something else."""
    torch.manual_seed(8)
    path, width = [0, 2, 3, 7], 9
    masks = [1, 0b11, 0b101, 0b1101, 0b10011, 0b100101, 0b1000011, 0b10001101, 0b100010011]
    for prefix in PREFIXES:
        text = Text(prefix + width, rule)
        length = torch.tensor([prefix], dtype=torch.int32, device=DEVICE)
        mask = torch.tensor([masks], device=DEVICE)
        batch = DecodeBatch(Mode.VERIFY, width, width, length, mask, text.table, prefix + width)
        tree = attend(text.pool, batch, text.q[prefix:], rule=rule)
        expected = references.decode(text.q[prefix:], text.pool.layer(0), batch, rule, sinks_of(rule))
        assert_close(tree, expected, DTYPE)
        for depth, node in enumerate(path):  # what a commit does, and the queries too
            place, source = (token_place(text.table, prefix + column) for column in (depth, node))
            for x in text.pool.tensors[0]:
                x[0][place] = x[0][source].clone()
            text.q[prefix + depth] = text.q[prefix + node].clone()
        for depth, node in enumerate(path):
            assert torch.equal(tree[node], text.plain(prefix + depth)[0]), (prefix, node)


def token_place(table: Tensor, position: int) -> tuple[int, int]:
    return int(table[0, position // PAGE]), position % PAGE


@pytest.mark.parametrize("rows", [4] if INTERPRETED else [1, 4])
def test_rows_do_not_depend_on_the_other_requests(rows: int) -> None:
    """Nor on what an earlier pass left in the workspace, or on how long requests may be."""
    torch.manual_seed(9)
    num_pages = sum(-(-(n + rows) // PAGE) for n in PREFIXES) + 3
    pool = random_pool(num_pages, PAGE, KV_HEADS, HEAD_DIM, DTYPE)
    whole = random_decode(Mode.VERIFY, rows, rows, PREFIXES, PAGE, num_pages)
    q = random_rows(whole.num_rows, GROUP * KV_HEADS, HEAD_DIM, DTYPE)
    backend = TritonBackend(SPAN)
    expected = attend(pool, whole, q, backend).view(len(PREFIXES), rows, -1)
    for chosen in [[i] for i in range(len(PREFIXES))] + [[2, 0], [4, 1, 3], [3, 3, 2]]:
        part = DecodeBatch(
            Mode.VERIFY,
            rows,
            rows,
            whole.prefix_len[chosen],
            whole.mask[chosen],
            whole.page_table[chosen],
            max(PREFIXES[i] for i in chosen) + rows,
        )
        own = q.view(len(PREFIXES), rows, *q.shape[1:])[chosen].flatten(0, 1)
        for batch in (part, dataclasses.replace(part, max_kv_len=8 * SPAN)):
            out = attend(pool, batch, own, backend).view(len(chosen), rows, -1)
            assert torch.equal(out, expected[chosen]), chosen


def test_prompts_equal_decoding_however_they_are_cut() -> None:
    torch.manual_seed(10)
    length = SPAN + 90
    text = Text(length)
    whole = text.chunks([0, length])
    cuts_of_text = [[0, 1, 20, length], [0, 64, SPAN + 1, length], [0, 31, 32, 64, SPAN - 5, length]]
    for cuts in cuts_of_text[2:] if INTERPRETED else cuts_of_text:
        assert torch.equal(text.chunks(cuts), whole), cuts
    for position in (0, 5, 63, 64, SPAN - 1, SPAN, length - 1):
        assert torch.equal(text.plain(position)[0], whole[position]), position


def test_pieces_cover_every_row() -> None:
    table = torch.zeros((3, 8), dtype=torch.int32, device=DEVICE)
    batch = PrefillBatch.from_lists([9, 0, 100], [3, 40, 16], table)
    pieces = list_pieces(batch, 16)
    assert [p for p in pieces if p[0] == 0] == [(0, 0, 9, 1), (0, 1, 10, 1), (0, 2, 11, 1)]
    assert [p for p in pieces if p[0] == 1] == [(1, 3, 0, 16), (1, 19, 16, 16), (1, 27, 24, 16)]
    assert [p for p in pieces if p[0] == 2] == [(2, 43, 100, 16)]


def test_chunks_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for few pieces at once."""
    monkeypatch.setattr("aerie.attention.backends.triton_backend.MAX_PIECE_PARTIALS", 3)
    monkeypatch.setattr("tests.attention.backends.test_triton_prefill.build_backend", lambda *_: TritonBackend(SPAN))
    check_prefill([0, 40, 3], [50, 2, 2 * SPAN], GROUP, KV_HEADS, HEAD_DIM, PAGE, DTYPE)
