"""The registry of architectures: what it has, and what it says of others."""

import json
from pathlib import Path

import pytest

from tests.support.tiny_models import make_target
from workers.config import ModelSource
from workers.models.family import ModelFamily
from workers.models.loading import read_target_config
from workers.models.registry import ARCHITECTURES, family_of


def test_an_unknown_architecture_names_those_that_exist(tmp_path: Path) -> None:
    folder = make_target(tmp_path / "t", num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text())
    known = "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, .*"
    for architectures, name in ((["MixtralForCausalLM"], "MixtralForCausalLM"), (None, "none")):
        (folder / "config.json").write_text(json.dumps(config | {"architectures": architectures}))
        with pytest.raises(ValueError, match=f"architecture {name} is not supported as a target; .* {known}$"):
            read_target_config(ModelSource(path=str(folder)), 1)


def test_every_row_of_the_registry_leads_to_a_family() -> None:
    for architecture in ARCHITECTURES:
        assert isinstance(family_of(architecture, "model x"), ModelFamily)
