"""Rows whose output is unused: in the last layer, only their KV is computed."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from aerie.attention.backends.torch_backend import TorchBackend
from aerie.attention.kv_cache.pool import KVPool
from aerie.kernels.experts.route import TokenSlots
from aerie.kernels.kv.batches import DecodeBatch, Mode, PrefillBatch, causal_mask
from aerie.speculative.build import local_engine
from aerie.speculative.config import Method, SpeculativeConfig
from aerie.speculative.drafts.drafter import DraftLayer
from aerie.workers.config import ModelSource
from aerie.workers.distributed.tp_group import SOLO
from aerie.workers.layers.decoder_layer import DecoderLayer
from aerie.workers.layers.forward_context import Attending
from aerie.workers.layers.moe import GatedMLP
from aerie.workers.models.decoder import Decoder
from aerie.workers.models.loading import load_target, read_target_config
from aerie.workers.runner.model_runner import TargetRunner
from aerie.workers.scheduling.plan import SamplingParams
from tests.speculative.conftest import Pair
from tests.support.tiny_models import LAYERS, make_target

CPU = torch.device("cpu")
NUM_PAGES, PAGE_SIZE = 40, 4


def target_runner(pair: Pair, capture: tuple[int, ...] = (1,)) -> TargetRunner:
    source = ModelSource(path=str(pair.target), device="cpu")
    config = read_target_config(source, 1)
    model = load_target(source, config, SOLO, CPU, 128, capture)
    pool = KVPool(config.kv_groups(1, torch.float32), NUM_PAGES, PAGE_SIZE, CPU)
    return TargetRunner(model, pool, dict.fromkeys(Mode, TorchBackend()))


@pytest.mark.parametrize("running", [0, 2])
def test_a_chunks_last_row_is_what_it_is_among_all_rows(pair: Pair, running: int) -> None:
    tables = torch.arange(1, 37, dtype=torch.int32).view(4, 9)
    chunks = PrefillBatch.from_lists([0, 5], [7, 1], tables[2:])
    tail = None
    if running:
        length = torch.tensor([6, 11], dtype=torch.int32)
        tail = DecodeBatch(Mode.VERIFY, 3, 3, length, causal_mask(2, 3, CPU), tables[:2], 14)
    ids = torch.randint(2, 60, (3 * running + 8,), generator=torch.Generator().manual_seed(1))
    last, whole = target_runner(pair), target_runner(pair)
    out = last.forward(ids, tail, None, chunks)
    expected = whole.forward(ids, tail, None, chunks, every_row=True)
    rows = [*range(3 * running), 3 * running + 6, 3 * running + 7]
    assert expected.hidden.shape[0] == ids.shape[0] and out.hidden.shape[0] == len(rows)
    # float32, products of other numbers of rows
    torch.testing.assert_close(out.hidden, expected.hidden[rows], atol=1e-5, rtol=1e-5)
    assert out.captured is not None and expected.captured is not None
    assert torch.equal(out.captured, expected.captured)
    for layer in range(len(last.model.layers)):
        ours, theirs = last.pool.layer(layer), whole.pool.layer(layer)
        assert torch.equal(ours.k, theirs.k) and torch.equal(ours.v, theirs.v)


def test_what_leaves_the_last_layer_can_be_captured(pair: Pair) -> None:
    """Before the final norm: normalised, it is the hidden state."""
    runner = target_runner(pair, capture=(1, LAYERS))
    chunks = PrefillBatch.from_lists([0], [9], torch.arange(1, 4, dtype=torch.int32)[None])
    out = runner.forward(torch.arange(2, 11), None, None, chunks, every_row=True)
    assert out.captured is not None
    first, last = (each.contiguous() for each in out.captured.view(9, 2, -1).unbind(1))
    assert torch.equal(runner.model.norm(last), out.hidden) and not torch.equal(first, last)


@pytest.mark.parametrize("family", ["Llama", "DeepseekV3"])
def test_a_layer_keeps_what_it_keeps_when_it_attends(pair: Pair, family: str, tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", architecture=family) if family != "Llama" else pair.target
    runner = target_runner(replace(pair, target=target))
    layer: DecoderLayer = runner.model.layers[0]  # type: ignore[assignment]
    chunks = PrefillBatch.from_lists([0], [9], torch.arange(1, 4, dtype=torch.int32)[None])
    context = runner.context(None, chunks=chunks, attending=None)
    x, angles = runner.model.embed_tokens(torch.arange(2, 11)), runner.model.rotary[0].at(context.positions)
    layer.self_attn.partial(x, angles, context)  # type: ignore[operator, union-attr]
    kept = [tensor.clone() for tensor in runner.pool.tensors[0]]
    for tensor in runner.pool.tensors[0]:
        tensor.zero_()
    none_attend = runner.context(None, chunks=chunks, attending=Attending.none(CPU))
    assert context.chunks is not None and none_attend.chunks is None
    layer.self_attn.keep(x, angles, none_attend)  # type: ignore[operator, union-attr]
    for tensor, expected in zip(runner.pool.tensors[0], kept, strict=True):
        assert torch.equal(tensor, expected) and expected[0].any()


@pytest.fixture
def mlp_rows(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Rows that reach the MLPs of the target's first and last layer and of the draft, a pass each."""
    seen: dict[str, list[int]] = defaultdict(list)
    names: dict[int, str] = {}

    def note(module: DecoderLayer | DraftLayer, name: str) -> None:
        names[id(module.mlp)] = name

    head_init, decoder_init, partial = DraftLayer.__init__, Decoder.__init__, GatedMLP.partial

    def init_head(self: DraftLayer, *arguments: object) -> None:
        head_init(self, *arguments)  # type: ignore[arg-type]
        note(self, "draft")

    def init_decoder(self: Decoder, *arguments: object) -> None:
        decoder_init(self, *arguments)  # type: ignore[arg-type]
        note(self.layers[0], "first")  # type: ignore[arg-type]
        note(self.layers[-1], "last")  # type: ignore[arg-type]

    def counted(self: GatedMLP, x: Tensor, live: TokenSlots | None = None) -> Tensor:
        seen[names.get(id(self), "between")].append(x.shape[0])
        return partial(self, x, live)

    monkeypatch.setattr(DraftLayer, "__init__", init_head)
    monkeypatch.setattr(Decoder, "__init__", init_decoder)
    monkeypatch.setattr(GatedMLP, "partial", counted)
    return seen


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_only_newest_rows_go_through_the_drafts_layer(pair: Pair, kind: Method, mlp_rows: dict[str, list[int]]) -> None:
    """A prompt of 40 tokens in chunks of 32, and rounds with a chain of three; what does not speculate is not drafted
    for, nor is a chunk that does not end its prompt."""
    seen, path = mlp_rows, pair.eagle if kind == "eagle" else pair.eagle3
    with local_engine(pair.spec(SpeculativeConfig(str(path), kind, 3, 1, 4))) as engine:
        seen.clear()  # of warming up
        engine.generate([list(range(2, 42))], SamplingParams(12, 0.0, speculative=False), 1)
        assert seen["first"] == [32, 8, *[1] * 11] and not seen["draft"]
        engine.scheduler.flush_prefix_cache()
        seen.clear()
        engine.generate([list(range(2, 42))], SamplingParams(12, 0.0), 1)
    assert seen["first"][:2] == [32, 8] and set(seen["first"][2:]) == {4}
    # EAGLE's features are the last layer's, of every row
    assert seen["last"][:2] == ([32, 8] if kind == "eagle" else [1, 1]) and set(seen["last"][2:]) == {4}
    assert set(seen["draft"]) == {1}
