"""`aerie train-draft --adapter`: what is trained and merged is what the engine serves, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from aerie.speculative.build import adaptable_draft, check_weights, plan_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.speculative.training import TrainingError
from aerie.speculative.training.adapters import merge_adapter
from aerie.speculative.training.draft import DraftVocabulary
from aerie.speculative.training.eagle3 import build_head, draft_config, read_draft_config, save_draft
from aerie.workers.config import LoraConfig
from tests.speculative.adapters.test_adapter_files import spec_of
from tests.speculative.training.conftest import run
from tests.support.targets.adapters import adapted_model, make_adapter
from tests.support.tiny_models import make_target

SIZES = "--steps 2 --warmup-steps 1 --batch-tokens 256 --val-fraction 0 --ttt-length 2 --no-keep-checkpoint"


@pytest.fixture
def pair(tmp_path: Path, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A folder with a target, a head of it, and an adapter."""
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    config = draft_config(target, 64)
    vocabulary = DraftVocabulary.of(torch.arange(64) * 3, target.config.vocab_size)
    head = build_head(target, read_draft_config(config, target, tmp_path / "head"), vocabulary, seed=0)
    save_draft(head, vocabulary, config, tmp_path / "head")
    make_adapter(tmp_path / "adapter", tmp_path / "target", 1)
    return tmp_path


def test_the_trained_adapter_is_one_that_the_engine_loads(pair: Path, rows: Path) -> None:
    line = f"train-draft --target {pair / 'target'} --adapter {pair / 'adapter'} --draft {pair / 'head'} --lora-rank 4"
    assert run(f"{line} --data {rows} --output {pair / 'adapter' / 'draft'} {SIZES}") == 0
    tensors = load_file(pair / "adapter" / "draft" / "adapter_model.safetensors")
    assert all(bool(tensor.any()) for tensor in tensors.values()), "both matrices of each layer have learnt"
    config = json.loads((pair / "adapter" / "draft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8) and "fc" in config["target_modules"]
    spec = spec_of(pair / "target", LoraConfig({"a": str(pair / "adapter")}))
    spec = type(spec)(spec.worker, SpeculativeConfig(str(pair / "head"), "eagle3", 3, 1, 4))
    plan = plan_engine(spec)
    names = adaptable_draft(plan)
    assert names is not None and sum(len(each.shape.parts) for each in names.layers.values()) == len(tensors) // 2
    check_weights(spec, plan)
    small = spec_of(pair / "target", LoraConfig({"a": str(pair / "adapter")}, max_lora_rank=16))
    config["r"] = 32
    (pair / "adapter" / "draft" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"lora\.modules\.a: adapter .*/draft: has rank 32, above max_lora_rank=16"):
        check_weights(type(spec)(small.worker, spec.speculative), plan)


def test_a_target_is_merged_as_peft_merges_it(pair: Path) -> None:
    from peft import PeftModel

    ours, theirs = (AutoModelForCausalLM.from_pretrained(pair / "target") for _ in range(2))
    merge_adapter(ours, pair / "adapter")
    expected = PeftModel.from_pretrained(theirs, str(pair / "adapter")).merge_and_unload().state_dict()
    for name, weight in ours.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings(
    "ignore:Setting `save_embedding_layers`", "ignore:Model has `tie_word_embeddings=True`"
)  # peft
@pytest.mark.parametrize("tied", [False, True])
def test_the_targets_embedding_and_head_are_changed_apart(tmp_path: Path, tied: bool) -> None:
    """Also if they are tied, as in peft's model before a merge; a copy of the base's weight that was trained is
    refused."""
    folder = make_target(tmp_path / "target", tie_word_embeddings=tied, num_hidden_layers=1)
    adapter = make_adapter(tmp_path / "adapter", folder, 1, target_modules=["embed_tokens", "lm_head", "q_proj"])
    ours, ids = AutoModelForCausalLM.from_pretrained(folder), torch.arange(2, 40)[None]
    merge_adapter(ours, adapter)
    with torch.inference_mode():
        found, expected = (model(ids).logits for model in (ours, adapted_model(folder, adapter, merges=False)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors["base_model.model.lm_head.base_layer.weight"][3, 3] += 0.1
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(TrainingError, match="lm_head.base_layer.weight differs from the target's weight; merge it"):
        merge_adapter(AutoModelForCausalLM.from_pretrained(folder), adapter)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--adapter {pair}/adapter", "adapter: needs --draft"),
        ("--draft {pair}/head", "is only for --adapter"),
        ("--adapter {pair}/nowhere --draft {pair}/head", "nowhere/adapter_config.json: cannot be read"),
        ("--adapter {pair}/other --draft {pair}/head", "does not fit the target"),
        ("--adapter {pair}/adapter --draft {pair}/head --draft-vocab 64", "draft_vocab=64"),
        ("--method dspark --adapter {pair}/adapter --draft {pair}/head", "adapters are trained for eagle3 heads only"),
    ],
)
def test_what_does_not_fit_is_refused(pair: Path, rows: Path, options: str, message: str) -> None:
    from tests.support.tiny_models import make_target

    make_adapter(pair / "other", make_target(pair / "wide"), 1)
    line = f"train-draft --target {pair / 'target'} --data {rows} --output {pair / 'out'} {SIZES}"
    with pytest.raises(TrainingError, match=re.escape(message)):
        run(f"{line} {options.format(pair=pair)}")
