"""The triton backend with a span: a row's bits are a function of its path alone. On a GPU, or small cases under
Triton's interpreter, see `test_triton_backend`."""

import dataclasses
from itertools import pairwise

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the triton backend needs triton, which is not installed here")

from aerie.attention.backends import triton_backend  # noqa: E402
from aerie.attention.backends.triton_backend import FIXED_SPAN, TritonBackend  # noqa: E402
from aerie.attention.config import LATENT_PAGE_SIZE  # noqa: E402
from aerie.attention.kv_cache.layout import HeadsLayout, LatentLayout  # noqa: E402
from aerie.attention.kv_cache.pool import KVPool  # noqa: E402
from aerie.kernels.attend import decode_plan_triton, references, split_kv_triton  # noqa: E402
from aerie.kernels.attend.fixed import spans_triton  # noqa: E402
from aerie.kernels.attend.scores import ScoreRule  # noqa: E402
from aerie.kernels.kv.batches import DecodeBatch, LatentKV, Mode, PrefillBatch, causal_mask  # noqa: E402
from aerie.kernels.kv.stored_values import FP8  # noqa: E402
from tests.attention.backends.test_triton_prefill import check_prefill  # noqa: E402
from tests.support.kernels.attention_cases import fill_randomly, uniform_pool  # noqa: E402
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
RULED = "plain", "narrow, sinks", "window, cap, sinks"
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
GROUP, KV_HEADS, HEAD_DIM, PAGE = (4, 1, 16, 16) if INTERPRETED else (4, 8, 128, 16)
LATENT_HEADS, LATENT, ROTATED = (5, 32, 16) if INTERPRETED else (16, 512, 64)
SCALE = HEAD_DIM**-0.5
PLAIN = ScoreRule(SCALE)
# The second hides columns of a suffix's own path.
RULES = [PLAIN, ScoreRule(SCALE, 3, has_sinks=True), ScoreRule(SCALE, 100, soft_cap=1.0, has_sinks=True)]
# of a request and its suffix: short, at a tile's end and a span's, one of which the suffix reaches across
PREFIXES = [0, 1, 57, SPAN - 3, SPAN + 60] if INTERPRETED else [0, 1, 61, 640, 1021, 1023, 1024, 2047, 5000]


class Text:
    """One request's pages and queries, of which any rows may be computed: `q` [length, heads, head_dim]."""

    def __init__(
        self, length: int, rule: ScoreRule | None = PLAIN, kv_dtype: torch.dtype = DTYPE, page_size: int = PAGE
    ) -> None:
        """rule: None for latent rows."""
        self.rule, self.page_size = rule or PLAIN, page_size
        num_pages = -(-length // page_size) + 5
        latent, heads = LatentLayout(LATENT, ROTATED, kv_dtype), HeadsLayout(KV_HEADS, HEAD_DIM, kv_dtype)
        self.pool = uniform_pool(1, num_pages, page_size, latent if rule is None else heads, DEVICE)
        fill_randomly(self.pool)
        self.table = random_table([length], page_size, num_pages)
        shape = (LATENT_HEADS, LATENT + ROTATED) if rule is None else (GROUP * KV_HEADS, HEAD_DIM)
        self.q = random_rows(length, *shape, DTYPE)

    def plain(self, position: int) -> Tensor:
        """The row at `position`, in a pass of its own."""
        return self.chain(position, 1)

    def chain(self, prefix: int, rows: int, declared: bool = False) -> Tensor:
        mode = Mode.DECODE if rows == 1 else Mode.VERIFY
        length = torch.tensor([prefix], dtype=torch.int32, device=DEVICE)
        mask = causal_mask(1, rows, DEVICE)
        batch = DecodeBatch(mode, rows, rows, length, mask, self.table, prefix + rows, chain=declared)
        return attend(self.pool, batch, self.q[prefix : prefix + rows], rule=self.rule)

    def chunks(self, cuts: list[int]) -> Tensor:
        """All rows, as the chunks between `cuts` in one batch."""
        starts, counts = cuts[:-1], [end - start for start, end in pairwise(cuts)]
        batch = PrefillBatch.from_lists(starts, counts, self.table.expand(len(starts), -1))
        return attend(self.pool, batch, self.q, rule=self.rule)


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


@pytest.fixture(params=[1, 1000], ids=["one item", "many items"])
def items_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of multiprocessors, which decides how many spans an item has."""
    monkeypatch.setattr(triton_backend, "_num_multiprocessors", lambda device: request.param)


def test_spans_depend_on_positions_only() -> None:
    sizes = [b - a for a, b in pairwise(spans_triton.span_starts(200_000, 64))]
    assert sizes[:-1] == [64] * 4 + [128] * 6 + [256] * 12 + [512] * 24 + [1024] * (len(sizes) - 47)
    for length in (1, 63, 64, 65, 1023, 1024, 1025, 1280, 1281, 4095, 4096, 4097, 5120, 5121, 131072):
        starts = spans_triton.span_starts(length, 64)
        assert starts[-1] == length and spans_triton.num_spans(length, 64) == len(starts) - 1, length
        assert starts[:-1] == spans_triton.span_starts(200_000, 64)[: len(starts) - 1]


@pytest.mark.parametrize("window", [None, 300])
def test_contexts_are_cut_at_the_same_places_in_every_batch(window: int | None) -> None:
    lengths = [1, 63, 64, 65, 320, 1024, 1025, 1300, 4095, 4096, 4097, 7000]
    prefix = torch.tensor([length - 1 for length in lengths], dtype=torch.int32, device=DEVICE)
    for max_kv_len in (7000, 9000):
        items = split_kv_triton.plan_spans(prefix, 1, 64, max_kv_len, window)
        rows = items.items.tolist()
        each = len(rows) // len(lengths)
        for request, length in enumerate(lengths):
            borders = list(pairwise(spans_triton.span_starts(length, 64)))
            seen = [span for span in borders if window is None or span[1] > length - window]
            used = [row for row in rows[request * each : (request + 1) * each] if row[0] != split_kv_triton.IDLE.value]
            assert [tuple(row[1:3]) for row in used] == seen and {row[0] for row in used} == {request}
            assert [row[3] - row[4] for row in used] == list(range(len(seen)))
            assert {row[5] for row in used} == {len(seen)} and items.requests[request].tolist() == [
                used[0][4],
                len(seen),
            ]


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("paths", [False, True], ids=["rows", "paths"])
@pytest.mark.parametrize("leads", [False, True], ids=["apart", "leading"])
def test_items_of_several_spans_cover_each_span_once(window: int | None, paths: bool, leads: bool) -> None:
    lengths, span, tile, rows = [3, 63, 64, 65, 320, 1024, 1300, 4096, 7000], 64, 32, 3
    prefix = torch.tensor([length - rows for length in lengths], dtype=torch.int32, device=DEVICE)
    for budget in (1, 12, 200):
        plan = split_kv_triton.plan_whole_spans(
            *(prefix, rows, budget, tile, span, decode_plan_triton.MAX_SPLITS),
            *(7000, window, paths, leads),
        )
        assert len(plan.items) == len(lengths) + budget
        items = [row for row in plan.items.tolist() if row[0] != split_kv_triton.IDLE.value]
        stride = split_kv_triton.max_spans(rows, span, 7000, window) + 1
        for request, length in enumerate(lengths):
            first, count = plan.requests[request].tolist()
            mine = [row for row in items if row[0] == request]
            end = (length - rows) // tile * tile if paths else length
            origin = 0 if window is None else max(length - rows + 1 - window, 0) // tile * tile
            borders = [border for border in spans_triton.span_starts(end, span) if border > origin] if end else []
            lows, highs = [row[1] for row in mine], [row[2] for row in mine]
            assert lows == [*[origin] * bool(mine), *highs[:-1]] and set(highs) <= set(borders), (budget, request)
            assert (highs[-1] if mine else origin) == end and all(row[4:6] == [first, count] for row in mine)
            spans = len(borders)
            is_open = paths and spans > 0 and end not in spans_triton.span_starts(2 * 7000, span)
            expected = []  # the partial result of each item's first span
            for i, row in enumerate(mine):
                before = sum(border <= row[1] for border in borders)
                in_leading = sum(border <= mine[0][2] for border in borders)
                expected.append(first + (0 if i == 0 else before - in_leading + 1 if leads else before))
            assert [row[3] for row in mine] == expected
            complete = spans - is_open
            if leads and mine:
                in_leading = sum(border <= mine[0][2] for border in borders)
                complete = 1 + spans - in_leading - (is_open and spans > in_leading)
            assert count == complete and first == request * stride and count + is_open <= stride


@pytest.mark.parametrize("rows,suffix_len", [(1, 1), (5, 9)] if INTERPRETED else [(1, 1), (4, 4), (5, 9), (21, 21)])
@pytest.mark.parametrize("mode", [Mode.VERIFY, Mode.DRAFT_EXTEND])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.usefixtures("items_by")
def test_attention_is_right(rows: int, suffix_len: int, mode: Mode, window: int | None) -> None:
    torch.manual_seed(rows)
    num_pages = sum(-(-(n + suffix_len) // PAGE) for n in PREFIXES) + 3
    pool = random_pool(num_pages, PAGE, KV_HEADS, HEAD_DIM, DTYPE)
    batch = random_decode(mode, rows, suffix_len, PREFIXES, PAGE, num_pages, window)
    q = random_rows(batch.num_rows, GROUP * KV_HEADS, HEAD_DIM, DTYPE)
    assert_close(attend(pool, batch, q), references.decode(q, pool.layer(0), batch, ScoreRule(SCALE)), DTYPE)


@pytest.mark.parametrize("rule", [PLAIN, None], ids=["heads", "latent"])
@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("rows", [4] if INTERPRETED else [2, 4, 8])
def test_rows_of_a_chain_equal_rows_of_their_own(rows: int, declared: bool, rule: ScoreRule | None) -> None:
    """declared: the batch says that its rows are a chain; otherwise the kernel computes them as a tree."""
    torch.manual_seed(7)
    for prefix in PREFIXES:
        text = Text(prefix + rows, rule)
        together = text.chain(prefix, rows, declared)
        for row in range(rows):
            assert torch.equal(together[row], text.plain(prefix + row)[0]), (prefix, row)


@pytest.mark.parametrize("rule", [*RULES, None], ids=[*RULED, "latent"])
@pytest.mark.usefixtures("items_by")
def test_rows_of_a_tree_equal_those_of_their_path(rule: ScoreRule | None) -> None:
    """Path 0, 2, 3, 7 of a tree of 9 nodes, the others being something else."""
    torch.manual_seed(8)
    path, width = [0, 2, 3, 7], 9
    masks = [1, 0b11, 0b101, 0b1101, 0b10011, 0b100101, 0b1000011, 0b10001101, 0b100010011]
    for prefix in PREFIXES:
        text = Text(prefix + width, rule)
        length = torch.tensor([prefix], dtype=torch.int32, device=DEVICE)
        mask = torch.tensor([masks], device=DEVICE)
        batch = DecodeBatch(Mode.VERIFY, width, width, length, mask, text.table, prefix + width)
        tree = attend(text.pool, batch, text.q[prefix:], rule=text.rule)
        layer, q = text.pool.layer(0), text.q[prefix:]
        if isinstance(layer, LatentKV):
            expected = references.latent_decode(q, layer, batch, text.rule)
        else:
            expected = references.decode(q, layer, batch, text.rule, sinks_of(text.rule))
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
@pytest.mark.usefixtures("items_by")
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
        for batch in (part, dataclasses.replace(part, max_kv_len=64 * SPAN)):
            out = attend(pool, batch, own, backend).view(len(chosen), rows, -1)
            assert torch.equal(out, expected[chosen]), chosen


@pytest.mark.parametrize(
    "rule,page_size",
    [*((rule, PAGE) for rule in (*RULES, None)), (None, LATENT_PAGE_SIZE)],
    ids=[*RULED, "latent", "latent, tiles by tensor maps"],
)
@pytest.mark.parametrize("kv_dtype", [DTYPE, FP8], ids=["16 bits", "FP8"])
def test_prompts_equal_decoding_however_they_are_cut(
    rule: ScoreRule | None, kv_dtype: torch.dtype, page_size: int
) -> None:
    torch.manual_seed(10)
    length = SPAN + 90 if INTERPRETED else 17 * SPAN + 90
    text = Text(length, rule, kv_dtype, page_size)
    whole = text.chunks([0, length])
    cuts_of_text = [[0, 1, 20, length], [0, 64, SPAN + 1, length], [0, 31, 32, 64, SPAN - 5, length]]
    for cuts in cuts_of_text[2:] if INTERPRETED else cuts_of_text:
        assert torch.equal(text.chunks(cuts), whole), cuts
    for position in (0, 5, 63, 64, SPAN - 1, SPAN, length - 1):
        assert torch.equal(text.plain(position)[0], whole[position]), position


@pytest.mark.parametrize("rule", [PLAIN, None], ids=["heads", "latent"])
def test_a_padded_step_gives_the_same_bits(rule: ScoreRule | None) -> None:
    """Whose chunks only the device knows, as in a captured step."""
    torch.manual_seed(11)
    text = Text(SPAN + 40, rule)
    whole = text.chunks([0, 70, SPAN + 40])
    table = text.table.expand(3, -1).contiguous()
    batch = PrefillBatch.from_lists([0, 70], [70, SPAN - 30], table, SPAN + 60)
    q = torch.cat([text.q, text.q[:20]])
    found = attend(text.pool, dataclasses.replace(batch, lists=None), q)
    assert torch.equal(found[: SPAN + 40], whole) and not found[SPAN + 40 :].any()


@pytest.mark.parametrize("window", [None, 70])
def test_chunks_are_right(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.attention.backends.test_triton_prefill.build_backend", lambda *_: TritonBackend(SPAN))
    check_prefill([0, 40, 3], [50, 2, 2 * SPAN], GROUP, KV_HEADS, HEAD_DIM, PAGE, DTYPE, window)
