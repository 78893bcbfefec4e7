"""The registry of architectures: what it has, and what it says of others."""

import json
import sys
from pathlib import Path

import pytest

from aerie.workers.config import ModelSource
from aerie.workers.models.loading import read_target_config
from aerie.workers.models.registry import ARCHITECTURES, ModelFamily, family_of
from tests.support.repository.pages import page_code
from tests.support.tiny_models import make_target
from tests.workers.models.test_targets import check_greedy


def test_an_unknown_architecture_names_those_that_exist(tmp_path: Path) -> None:
    folder = make_target(tmp_path / "t", num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text())
    known = (
        "LlamaForCausalLM, Llama4ForCausalLM, Llama4ForConditionalGeneration, Qwen2ForCausalLM, Qwen3ForCausalLM, .*"
    )
    for architectures, name in ((["UnheardOfForCausalLM"], "UnheardOfForCausalLM"), (None, "none")):
        (folder / "config.json").write_text(json.dumps(config | {"architectures": architectures}))
        with pytest.raises(ValueError, match=f"architecture {name} is not supported as a target; .* {known}"):
            read_target_config(ModelSource(path=str(folder)), 1)


def test_every_row_of_the_registry_leads_to_a_family() -> None:
    for architecture in ARCHITECTURES:
        assert isinstance(family_of(architecture, "model x"), ModelFamily)


def test_the_family_of_the_page_answers_as_transformers_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/add-a-model.md."""
    page = page_code("add-a-model.md")
    monkeypatch.setitem(sys.modules, "aerie.workers.models.mistral", page)
    monkeypatch.setitem(ARCHITECTURES, "MistralForCausalLM", "mistral")
    target = make_target(tmp_path / "t", architecture="Mistral", num_hidden_layers=2, sliding_window=None)
    check_greedy(target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"sliding_window": 64}))
    with pytest.raises(ValueError, match="sliding_window=64 is not supported; only null is"):
        read_target_config(ModelSource(path=str(target)), 1)
