"""The method of a draft by its config.json, which `--draft`, the loader and errors share; and the table of
architectures with MTP modules, which plan, serve, loader and train-draft share."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.cluster.config import ConfigError
from aerie.deploy.cli import main
from aerie.deploy.config.drafts import draft_method, own_draft
from aerie.deploy.config.model import model_args
from aerie.speculative.config import Method, SpeculativeConfig
from aerie.speculative.drafts.mtp import Mtp
from aerie.speculative.drafts.recognition import method_of
from aerie.speculative.drafts.registry import METHODS, read_draft
from aerie.speculative.training.mtp import read_module, save_module
from aerie.workers.config import ModelSource
from aerie.workers.models.loading import read_target_config
from aerie.workers.models.registry import ARCHITECTURES, MTP_MODULES
from tests.speculative.drafts.test_mtp import within_a_model_of_images
from tests.support import ROOT
from tests.support.tiny_models import add_mtp, add_qwen_mtp, make_target

MODEL_TYPES = {
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
}


@pytest.mark.parametrize("architecture", sorted(MTP_MODULES))
def test_a_module_is_found_by_plan_loader_and_training_and_never_called_an_eagle_head(
    tmp_path: Path, architecture: str
) -> None:
    """In the target's checkpoint, and as a draft alone, as train-draft saves it."""
    folder = make_target(tmp_path / "t", architecture=architecture.partition("For")[0])
    (add_mtp if MTP_MODULES[architecture].after_layers else add_qwen_mtp)(folder)
    if architecture in MODEL_TYPES:
        folder = within_a_model_of_images(folder, tmp_path / "w")
        raw = json.loads((folder / "config.json").read_text()) | {"model_type": MODEL_TYPES[architecture]}
        (folder / "config.json").write_text(json.dumps(raw | {"vision_config": {}}))
    raw = json.loads((folder / "config.json").read_text())
    raw.get("text_config", raw).setdefault(MTP_MODULES[architecture].count_key, 1)
    (folder / "config.json").write_text(json.dumps(raw))
    assert raw["architectures"] == [architecture]

    found = own_draft(folder)
    assert found is not None and found["method"] == "mtp"
    target = read_target_config(ModelSource(path=str(folder)), 1)
    own = read_draft("mtp", "", str(folder), target)
    assert isinstance(own, Mtp)
    alone = tmp_path / "alone"
    save_module(read_module(folder), alone)

    section = model_args(str(folder), str(alone), None)["speculative"]
    assert section["method"] == "mtp"
    assert SpeculativeConfig(**section).shapes.drafted_by == "mtp"  # the name in metrics
    assert type(read_draft("mtp", str(alone), str(folder), target)) is type(own)
    for wrong in ("eagle", "eagle3", "dflash"):
        with pytest.raises(ValueError, match=rf"is an mtp head \(architecture {architecture}\); set method: mtp"):
            read_draft(wrong, str(alone), str(folder), target)


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - set(MTP_MODULES)))
def test_other_architectures_have_no_module(tmp_path: Path, architecture: str) -> None:
    raw = {"architectures": [architecture], "num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert own_draft(tmp_path) is None
    assert not any(method.recognises(raw) for method in METHODS["mtp"])


def test_a_plan_names_the_method_of_a_module_given_as_draft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny, saved = str(ROOT / "tests" / "models" / "deepseek_tiny"), tmp_path / "my.yaml"
    assert main(["plan", tiny, "--draft", tiny, "--save", str(saved), "--cpus", "8", "--gpus", "0"]) == 0
    (application,) = yaml.safe_load(saved.read_text())["applications"]
    assert application["args"]["speculative"] == {"method": "mtp", "path": tiny}
    assert "eagle" not in capsys.readouterr().out.lower()


WORDS = ["DeepseekV3ForCausalLM", "LlamaForCausalLMEagle3", "Qwen3DSparkModel", "DFlash2DraftModel", "DominoDraftModel"]
WORDS += ["LlamaForCausalLM", "Gemma4AssistantForCausalLM", "MedusaModel", "peagle", "eagle3", "dspark", ""]
VALUES = st.one_of(st.sampled_from([None, 0, 1, True, 2.5, [], {}, [3], {"projector_type": 3}]), st.sampled_from(WORDS))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "architectures": st.one_of(VALUES, st.lists(st.one_of(VALUES, st.sampled_from(WORDS)), max_size=2)),
            "speculators_model_type": VALUES,
            "dflash_config": VALUES,
            "markov_rank": VALUES,
            "draft_vocab_size": VALUES,
        },
    )
)
def test_any_config_is_of_one_method_of_none_or_refused(raw: dict[str, Any]) -> None:
    """A class recognises a draft only if it is of the draft's method."""
    try:
        found = method_of(raw)
    except ValueError as error:
        assert "is not served" in str(error)
        return
    assert found is None or found in get_args(Method)
    by_classes = {name for name, classes in METHODS.items() if any(each.recognises(raw) for each in classes)}
    assert by_classes == ({found} if found else set())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"architectures": ["MedusaModel"]}', "MedusaModel belongs to no known method; known are eagle, eagle3, mtp"),
        ('{"architectures": ["DSpineDraftModel"]}', "is a DSpine head, which is not served; use a DFlash head"),
        ('{"speculators_model_type": "medusa"}', "medusa belongs to no known method"),
        ("[1]", "its config.json is no object"),
        ("{", "its config.json cannot be read"),
    ],
)
def test_a_draft_of_no_method_is_refused_by_the_command_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        draft_method(tmp_path)
