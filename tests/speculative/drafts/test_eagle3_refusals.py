"""What an EAGLE-3 head's config.json says and is not done is refused with its key and the remedy; vocabularies that
cannot be the target's are too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aerie.speculative.build import plan_engine
from tests.speculative.conftest import Pair
from tests.speculative.drafts.test_eagle3_heads import check, flat, served, speculators
from tests.speculative.drafts.test_loading import spec_of
from tests.support.drafts.eagle3_reference import Head, save_head
from tests.support.engine_plans import build_worker

WITHOUT = r"use a head without it"


@pytest.fixture(scope="module")
def pair(deep_pair: Pair) -> Pair:
    return deep_pair


@pytest.mark.parametrize(
    "changes,message",
    [
        (
            {"norm_after_attention": True},
            rf"norm_after_attention=True is not supported; {WITHOUT}, or take the key out",
        ),
        ({"eagle_config": {"gating": "sigmoid"}}, rf"eagle_config.gating='sigmoid' is not supported; {WITHOUT}"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm=True is not supported; only False is"),
        ({"eagle_config": {"next_layer_regular": False}}, "next_layer_regular=False is not supported; only True is"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step=4 is not supported; only 1 is"),
        ({"dflash_config": {"mask_token_id": 3}}, r"dflash_config=\{'mask_token_id': 3\} is not supported"),
        ({"mask_token_id": 3}, f"mask_token_id=3 is not supported; {WITHOUT}"),
        ({"kv_lora_rank": 512}, f"kv_lora_rank=512 is not supported; {WITHOUT}"),
        ({"num_local_experts": 16}, f"num_local_experts=16 is not supported; {WITHOUT}"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported; only 1.0 is"),
        ({"fc_norm": "yes"}, "fc_norm='yes' must be true or false; set the trained value"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "Eagle3DeepseekV2.* use a head with Llama's or Qwen3's"),
        (
            {"layer_types": ["sliding_attention"]},
            "layer_types has sliding_attention, which is not supported; use a head",
        ),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type='longrope' is not supported; it is one of"),
        ({"quantization_config": {"quant_method": "quip"}}, "quant_method='quip' is not"),
        ({"target_hidden_size": 32}, r"made for a target of hidden_size=32, the target .* hidden_size=64"),
        ({"num_aux_hidden_states": 2}, "does not have 2 of; set eagle_config.eagle_aux_hidden_state_layer_ids"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, "which the target of 8 layers does not have 3 of"),
        (
            {"hidden_size": 32, "eagle_config": {"use_aux_hidden_state": False}},
            "hidden_size=32, the target has 64; use_aux_hidden_state=false means",
        ),
        (
            {"fc_norm": True, "eagle_config": {"use_aux_hidden_state": False}},
            "fc_norm apply to captured layers, but use_aux_hidden_state=false",
        ),
    ],
)
def test_what_would_be_ignored_is_refused_before_anything_runs(
    pair: Pair, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    draft = save_head(tmp_path / "d", flat(Head()) | changes, {})
    with pytest.raises(ValueError, match=message):
        plan_engine(spec_of(pair.target, draft))


def test_nested_configurations_are_looked_through_too(pair: Pair, tmp_path: Path) -> None:
    config = speculators(Head())
    config["transformer_layer_config"] |= {"attn_output_gate": True}
    with pytest.raises(ValueError, match="transformer_layer_config.attn_output_gate=True is not supported"):
        plan_engine(spec_of(pair.target, save_head(tmp_path / "a", config, {})))
    config = speculators(Head(), "gemma3")
    with pytest.raises(
        ValueError, match="model_type='gemma3' is not supported; use a head whose layers are of llama or"
    ):
        plan_engine(spec_of(pair.target, save_head(tmp_path / "b", config, {})))


def test_speculators_of_another_kind_are_refused(pair: Pair, tmp_path: Path) -> None:
    config = speculators(Head(), architectures=["PEagleDraftModel"], speculators_model_type="peagle")
    draft = save_head(tmp_path / "d", config, {})
    with pytest.raises(
        ValueError, match="PEagleDraftModel\\) is a P-EAGLE head, which is not served; use a DFlash head"
    ):
        plan_engine(spec_of(pair.target, draft))


def test_flags_of_eagle3_on_an_eagle_head_are_refused(pair: Pair, tmp_path: Path) -> None:
    config = flat(Head(), architectures=["LlamaForCausalLM"], target_hidden_size=None, norm_output=True)
    del config["draft_vocab_size"]
    with pytest.raises(
        ValueError, match="norm_output exists only in EAGLE-3 heads; set speculative.method: eagle3 if it is one"
    ):
        plan_engine(spec_of(pair.target, save_head(tmp_path / "d", config, {}), "eagle"))


def test_a_head_of_another_width_must_have_its_own_embedding(pair: Pair, tmp_path: Path) -> None:
    head = Head(hidden=32, heads=2, kv_heads=1)
    spec = spec_of(pair.target, save_head(tmp_path / "d", flat(head), head.tensors()))
    with pytest.raises(
        ValueError, match="hidden_size=32 but no embed_tokens.weight, and that of the target has width 64"
    ):
        build_worker(spec, plan_engine(spec))


def test_a_layer_that_the_checkpoint_lacks_is_named(pair: Pair, tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in Head(layers=2).tensors().items() if "layers.2" not in name}
    spec = spec_of(pair.target, save_head(tmp_path / "d", flat(Head(layers=3)), tensors))
    with pytest.raises(ValueError, match="missing: layers.2"):
        build_worker(spec, plan_engine(spec))


def with_vocabulary(head: Head, d2t: Tensor | None, t2d: Tensor | None) -> dict[str, Tensor]:
    given = {name: tensor for name, tensor in (("d2t", d2t), ("t2d", t2d)) if tensor is not None}
    return {name: tensor for name, tensor in head.tensors().items() if name not in ("d2t", "t2d")} | given


@pytest.mark.parametrize("form", ["offsets", "offsets alone", "int32", "ids", "ids in another order", "t2d all false"])
def test_vocabularies_load_in_every_published_form(pair: Pair, tmp_path: Path, form: str) -> None:
    head = Head()
    ids = torch.randperm(96, generator=torch.Generator().manual_seed(8))[:40]
    ids = ids if form == "ids in another order" else ids.sort().values
    members = torch.zeros(96, dtype=torch.bool).index_fill(0, ids, True)
    offsets = ids - torch.arange(40)
    d2t = {"ids": ids, "ids in another order": ids, "int32": offsets.int()}.get(form, offsets)
    t2d = {"offsets alone": None, "t2d all false": torch.zeros(96, dtype=torch.bool)}.get(form, members)
    draft = save_head(tmp_path / "d", flat(head), with_vocabulary(head, d2t, t2d))
    assert torch.equal(served(draft, pair.target).model.to_target(torch.arange(40)), ids)


@pytest.mark.parametrize("zeros", [True, False])
def test_a_vocabulary_that_is_the_targets_needs_no_map(pair: Pair, tmp_path: Path, zeros: bool) -> None:
    head = Head(draft_vocab=96)
    d2t = torch.zeros(96, dtype=torch.int64) if zeros else None
    tensors = with_vocabulary(head, d2t, None)
    draft = save_head(tmp_path / "d", flat(head, draft_vocab_size=None), tensors)
    assert served(draft, pair.target).model.target_ids is None
    check(pair, head, draft, tensors)


def test_a_map_and_its_members_must_agree(pair: Pair, tmp_path: Path) -> None:
    head = Head()
    members = torch.zeros(96, dtype=torch.bool).index_fill(0, torch.arange(40), True)
    draft = save_head(tmp_path / "d", flat(head), head.tensors() | {"t2d": members})
    with pytest.raises(ValueError, match="d2t and t2d name different tokens of the target, whether d2t has offsets or"):
        served(draft, pair.target)


def test_a_tied_head_has_its_own_embedding_as_vocabulary_head(pair: Pair, tmp_path: Path) -> None:
    head = Head(hidden=32, heads=2, kv_heads=1, draft_vocab=96, own_embedding=True)
    tensors = with_vocabulary(head, None, None)
    draft = save_head(
        tmp_path / "d",
        flat(head, tie_word_embeddings=True),
        {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"},
    )
    check(pair, head, draft, tensors | {"lm_head.weight": tensors["embed_tokens.weight"]})
