"""DFlash heads of every published format compute what their modules are published to, and are refused by name where
something would be ignored."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from aerie.attention.config import DraftAttention
from aerie.attention.kv_cache.pool import KVPool
from aerie.attention.registry import choose_backends
from aerie.kernels.capability import Capability
from aerie.kernels.kv.batches import PrefillBatch
from aerie.speculative.build import plan_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.speculative.drafts.blocks.config import LayerView
from aerie.speculative.drafts.blocks.dflash import Block, DFlash, DFlashModel
from aerie.speculative.drafts.blocks.drafter import block_states
from aerie.speculative.drafts.drafter import DraftRunner
from aerie.speculative.drafts.loading import load_draft
from aerie.speculative.drafts.recognition import method_of
from aerie.speculative.drafts.registry import read_draft
from aerie.speculative.speculation import draft_choices
from aerie.workers.config import ModelSource
from aerie.workers.distributed.tp_group import SOLO, TPGroup
from aerie.workers.layers.forward_context import Attending
from aerie.workers.models.config import read_config_json
from aerie.workers.models.loading import load_target, read_target_config
from aerie.workers.runner.backends import ModelShape
from tests.speculative.conftest import Pair
from tests.support.drafts.block_reference import BlockHead, BlockReference, deepspec, jetspec, speculators, z_lab
from tests.support.drafts.eagle3_reference import save_head
from tests.support.slow import slow
from tests.support.thread_group import on_ranks
from tests.support.tiny_models import VOCAB, make_target

CPU = torch.device("cpu")
LENGTH, PAGE_SIZE, NUM_PAGES = 83, 4, 30
PREVIOUS = [3, 21]  # tokens before a row; the second is compared
TOLERANCE = 1e-4  # float32, sums in another order: within 1e-5 of values of about 1


@pytest.fixture(scope="module")
def pair(deep_pair: Pair) -> Pair:
    return deep_pair


HEADS = {
    "z-lab": (BlockHead(), z_lab),
    "z-lab, block of 16": (BlockHead(block=16), z_lab),
    "z-lab, causal windows": (BlockHead(layers=3, windows=(64, None, 64), causal=(True, False, True)), z_lab),
    "JetSpec, causal": (BlockHead(causal=(True, True)), jetspec),
    "NeMo, causal": (BlockHead(causal=(True, True)), z_lab),
    "z-lab, scaled and capped": (BlockHead(scales=(3.0, 0.5, 2.0)), z_lab),
    "DeepSpec": (BlockHead(block=7, from_anchor=True), deepspec),
    "speculators": (BlockHead(draft_vocab=40, in_speculators=True), speculators),
    "speculators, from the anchor": (BlockHead(from_anchor=True, in_speculators=True), speculators),
    "speculators, windows": (
        BlockHead(layers=3, windows=(None, 64, 64), causal=(False,) * 3, in_speculators=True),
        speculators,
    ),
    "DeepSpec's DSpark": (BlockHead(block=7, from_anchor=True, kind="dspark"), deepspec),
    "speculators' DSpark, gated": (
        BlockHead(draft_vocab=40, in_speculators=True, from_anchor=True, kind="dspark", gated=True),
        speculators,
    ),
    "z-lab's DFlash2": (BlockHead(kind="dflash2"), z_lab),
    "Domino": (BlockHead(kind="domino"), z_lab),
    "Domino, shifted labels": (BlockHead(kind="domino", from_anchor=True, plain=2), z_lab),
    "speculators' DFlash2, three taps": (BlockHead(kind="dflash2", taps=3, in_speculators=True), speculators),
    "z-lab's DFlash2, scaled and capped": (BlockHead(kind="dflash2", scales=(0.5, 2.0, 3.0)), z_lab),
}


def served(draft: Path, target: Path, group: TPGroup = SOLO) -> DraftRunner:
    """The head in `draft` in float32 as an engine loads it, with a pool."""
    source = ModelSource(path=str(target), dtype="float32")
    config = read_target_config(source, group.size)
    method = read_draft(method_of(read_config_json(draft)) or "", str(draft), str(target), config)
    decoder = load_target(source, config, group, CPU, 128, method.capture)
    model = load_draft(method, source, decoder, group, CPU, 128)
    pool = KVPool(method.model.kv_groups(group.size, torch.float32), NUM_PAGES, PAGE_SIZE, CPU)
    shape = ModelShape(method.model, group.size, torch.float32, PAGE_SIZE, Capability.of(CPU))
    backends = choose_backends(draft_choices(DraftAttention(), shape, tree=method.masks_steps, window=method.window))
    return DraftRunner(model, pool, backends)


def block_logits(runner: DraftRunner, features: torch.Tensor, anchor: int, rows: int) -> torch.Tensor:
    """Return what `BlockReference.logits` gives, of a context that is written in three parts of any sizes."""
    table, none = torch.arange(1, NUM_PAGES + 1, dtype=torch.int32)[None], Attending.none(CPU)
    form = runner.model.form  # type: ignore[union-attr]
    for first, end in ((0, 7), (7, 8), (8, LENGTH)):
        chunks = PrefillBatch.from_lists([first], [end - first], table)
        nothing = torch.zeros(end - first, dtype=torch.int64)
        runner.model.keep(nothing, features[first:end], runner.context(None, None, chunks, none))
    ids = torch.tensor([[anchor] + [form.mask_token_id] * (rows - 1)])
    states = block_states(runner, ids, torch.tensor([LENGTH], dtype=torch.int32), table, LENGTH + rows)[0]
    states = states[not form.from_anchor :]
    logits = runner.model.logits(states)[None]
    block = Block(states[None], logits, runner.model.candidates_of(states[None], logits))
    model, previous = runner.model, torch.tensor(PREVIOUS)
    assert isinstance(model, DFlashModel)
    state = model.path_state(model.path_state(None, torch.tensor([anchor] * len(PREVIOUS))), previous)
    logits = [model.after(block, row, previous[None], state)[1] for row in range(len(states))]
    return runner.model.lm_head.shard.gather_logits(torch.stack(logits))


def expected(head: BlockHead, tensors: dict[str, torch.Tensor], target: Path, features: torch.Tensor, rows: int) -> Any:
    weights = load_file(str(target / "model.safetensors"))
    reference = BlockReference(head, tensors, weights["model.embed_tokens.weight"], weights["lm_head.weight"])
    states = reference.hidden(features, 17, rows)
    depths = rows - (not head.from_anchor)
    return torch.stack([reference.after(states, depth, 17, PREVIOUS[1]) for depth in range(1, depths + 1)])


SHARDED = ("z-lab", "Domino", "speculators' DSpark, gated", "speculators' DFlash2, three taps")


@pytest.mark.parametrize(
    "name,ranks",
    [
        *((name, 1) for name in HEADS),
        *((name, 2) for name in SHARDED),
        *slow(*((name, 2) for name in HEADS if name not in SHARDED)),
    ],
)
def test_logits_are_those_of_the_published_module(pair: Pair, tmp_path: Path, name: str, ranks: int) -> None:
    """Whole blocks and shorter ones, and a second block, after the context has overwritten the rows of the first."""
    head, layout = HEADS[name]
    tensors = head.tensors()
    draft = save_head(tmp_path / "d", layout(head), tensors)
    features = torch.randn(LENGTH, 3 * head.hidden, generator=torch.Generator().manual_seed(5))

    def on_rank(group: TPGroup) -> list[torch.Tensor]:
        with torch.inference_mode():
            runner = served(draft, pair.target, group)
            return [block_logits(runner, features, 17, rows) for rows in (head.block, 4, head.block)]

    for ours in on_ranks(ranks, on_rank):
        for logits, rows in zip(ours, (head.block, 4, head.block), strict=True):
            theirs = expected(head, tensors, pair.target, features, rows)
            if head.kind == "dflash2":  # the selector adds to log-probabilities, which differ from logits by a constant
                logits, theirs = logits.log_softmax(-1), theirs.log_softmax(-1)
            torch.testing.assert_close(logits, theirs, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_gemma_targets_scale_and_cap_are_not_the_drafts(tmp_path: Path) -> None:
    """`Scales`: a head reads the rows of the target's embedding, and its logits have its own cap."""
    settings = {"architecture": "Gemma3", "final_logit_softcapping": 0.5, "tie_word_embeddings": False}
    target = make_target(tmp_path / "target", num_hidden_layers=8, **settings)
    for name, cap in (("none", None), ("its own", 1.5)):
        head = BlockHead(scales=(1.0, 1.0, cap))
        draft = save_head(tmp_path / name, z_lab(head), head.tensors())
        features = torch.randn(LENGTH, 3 * head.hidden, generator=torch.Generator().manual_seed(5))
        with torch.inference_mode():
            runner = served(draft, target)
            ours = block_logits(runner, features, 17, 8)
        assert runner.model.lm_head.soft_cap == 0.5
        theirs = expected(head, head.tensors(), target, features, 8)
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_window_hides_the_text_before_it(pair: Pair, tmp_path: Path) -> None:
    """Else the comparison above would pass for heads whose windows are ignored."""
    head, layout = HEADS["speculators, windows"]
    features = torch.randn(LENGTH, 3 * head.hidden, generator=torch.Generator().manual_seed(5))
    wide = replace(head, windows=(None, None, None))
    seen, hidden = (expected(each, head.tensors(), pair.target, features, 8) for each in (wide, head))
    assert (seen - hidden).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"architectures": ["DominoDraftModel"]}, "is a domino head .*; set method: domino"),
        ({"dflash_config": {"projector_type": "domino"}}, "is a domino head .*; set method: domino"),
        ({"architectures": ["DSpineDraftModel"]}, "is a DSpine head, which is not served"),
        ({"architectures": ["LiLiCorrDraftModel"]}, "is a LiLiCorr head, which is not served"),
        ({"architectures": ["XPressDraftModel"]}, "is a XPress head, which is not served"),
        ({"speculators_model_type": "peagle"}, "is a P-EAGLE head, which is not served"),
        ({"architectures": ["Qwen3DSparkModel"]}, "is a dspark head .*; set method: dspark"),
        ({"architectures": ["DFlash2DraftModel"]}, "is a dflash2 head .*; set method: dflash2"),
        ({"mask_token_id": None}, "lacks 'mask_token_id'"),
        ({"mask_token_id": VOCAB}, f"mask_token_id={VOCAB}: the target's vocabulary has {VOCAB} tokens"),
        ({"target_layer_ids": [0, 1, 7]}, r"target_layer_ids=\[0, 1, 7\]: must name distinct layers before the last"),
        ({"target_layer_ids": []}, r"target_layer_ids=\[\]: must name"),
        ({"block_size": 64}, "block_size.*64.*from 1 to 63"),
        ({"block_size": 1}, "block_size=1: must be at least 2"),
        ({"num_target_layers": 36}, "num_target_layers=36, the target .* has 8 layers"),
        ({"hidden_size": 32}, "hidden_size=32, the target .* has hidden_size=64"),
        ({"layer_types": ["full_attention"]}, "layer_types=.*for each of 2 layers"),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 16, "use_sliding_window": True},
            "sliding_window=16: windows of fewer",
        ),
        ({"dflash_config": {"unheard_of": 1}}, "dflash_config.unheard_of=1 is not supported"),
        ({"architectures": ["Gemma4DSparkModel"]}, r"is a DeepSpec \(Gemma 4's layers\) head, which is not served"),
        ({"output_multiplier": -1}, "output_multiplier=-1: must be a number above 0"),
        ({"dflash_config": {"final_logit_softcapping": "x"}}, "final_logit_softcapping='x': must be a number above 0"),
        ({"dflash_config": {"causal": True, "causal_head": False}}, "both keys mean the same"),
        ({"another_flag": True}, "another_flag=True is not supported"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25 is not supported"),
    ],
)
def test_heads_that_do_not_fit_are_refused_by_name(
    pair: Pair, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = z_lab(BlockHead())
    nested = {key: value for key, value in changes.items() if key in ("mask_token_id", "target_layer_ids")}
    config["dflash_config"] |= nested | changes.get("dflash_config", {})
    config |= {key: value for key, value in changes.items() if key not in (*nested, "dflash_config")}
    draft = save_head(tmp_path / "d", config, {})
    with pytest.raises(ValueError, match=message):
        plan_engine(pair.spec(SpeculativeConfig(str(draft), "dflash", 3, 1, 4)))


@pytest.mark.parametrize(
    "method,changes,message",
    [
        (
            "dspark",
            {"markov_head_type": "rnn"},
            "markov_head_type='rnn' is not supported; use a head of type vanilla or",
        ),
        ("dspark", {"markov_rank": "x"}, "markov_rank='x'"),
        ("dspark", {"output_multiplier": 0.2}, "output_multiplier=0.2 is not supported; only 1.0 is"),
        ("dspark", {"final_logit_softcapping": 20.0}, "final_logit_softcapping=20.0 is not supported"),
        ("dflash2", {"conv_group_size": 7}, "conv_group_size=7: must divide hidden_size=64"),
        ("dflash2", {"draft_vocab_size": 40}, "draft_vocab_size=40.*whole vocabulary of 96"),
        ("dflash2", {"selector_top_k": 97}, "selector_top_k=97"),
    ],
)
def test_conditional_heads_that_do_not_fit_are_refused(
    pair: Pair, tmp_path: Path, method: Any, changes: dict[str, Any], message: str
) -> None:
    draft = save_head(tmp_path / "d", speculators(BlockHead(kind=method)) | changes, {})
    with pytest.raises(ValueError, match=message):
        plan_engine(pair.spec(SpeculativeConfig(str(draft), method, 3, 1, 4)))


def test_more_levels_than_a_block_has_are_refused(pair: Pair, tmp_path: Path) -> None:
    draft = save_head(tmp_path / "d", z_lab(BlockHead()), {})
    plan_engine(pair.spec(SpeculativeConfig(str(draft), "dflash", 7, 1, 8)))
    with pytest.raises(ValueError, match=r"num_steps=8: a block of draft .* has 7 draft tokens; set num_steps to at"):
        plan_engine(pair.spec(SpeculativeConfig(str(draft), "dflash", 8, 1, 9)))


def test_the_wrong_method_is_refused_with_the_right_one(pair: Pair, tmp_path: Path) -> None:
    draft = save_head(tmp_path / "d", z_lab(BlockHead()), {})
    with pytest.raises(ValueError, match=r"is a dflash head .*; set method: dflash$"):
        plan_engine(pair.spec(SpeculativeConfig(str(draft), "eagle3")))


def test_layers_are_named_by_output_or_by_input(pair: Pair, tmp_path: Path) -> None:
    """z-lab's target_layer_ids are of outputs, speculators' aux_hidden_state_layer_ids of inputs."""
    target = read_target_config(ModelSource(path=str(pair.target)), 1)
    ours = DFlash.read("d", z_lab(BlockHead(), [1, 3, 5]), target)
    theirs = DFlash.read("d", speculators(BlockHead(), [2, 4, 6]), target)
    assert ours.capture == theirs.capture == (2, 4, 6)


def test_variants_that_differ_at_the_edge_of_a_window_are_those_that_are_documented() -> None:
    """`LayerView.window`: z-lab's causal rows see `window` tokens each, speculators' bidirectional ones `window` before
    the block."""
    assert LayerView(True, 2047).window(8) == 2048 and LayerView(False, 2048).window(8) == 2056
    assert LayerView().window(8) is None
