"""A draft method is a file and a row: the example of docs/add-a-draft-method.md drafts through the same rounds."""

import json
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aerie.speculative.build import local_engine
from aerie.speculative.config import Method, SpeculativeConfig
from aerie.speculative.drafts.registry import METHODS, read_draft
from aerie.workers.models.config import read_config_json
from aerie.workers.models.loading import read_target_config
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request
from tests.speculative.conftest import Pair
from tests.speculative.drafts.test_loading import edited, spec_of
from tests.support.repository.pages import page_code
from tests.support.tiny_models import HIDDEN, LAYERS, MLP, make_target

NextN = page_code("add-a-draft-method.md").NextN


@pytest.fixture(scope="module")
def target_with_nextn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose next token follows from the last one mostly, and a module that passes the newest token's embedding
    on almost unchanged; it has copies of the target's embedding and head, which are not to be used."""
    target = make_target(tmp_path_factory.mktemp("nextn") / "target", calm=0.01)
    config = read_config_json(target)
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int, scale: float = 0.2) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    ones, eye = torch.ones(HIDDEN), torch.eye(HIDDEN)
    tensors = {
        "enorm.weight": ones.clone(),
        "hnorm.weight": ones.clone(),
        "eh_proj.weight": torch.cat((eye, 0.01 * eye), dim=1),
        "input_layernorm.weight": ones.clone(),
        "self_attn.q_proj.weight": normal(heads * dim, HIDDEN),
        "self_attn.k_proj.weight": normal(kv_heads * dim, HIDDEN),
        "self_attn.v_proj.weight": normal(kv_heads * dim, HIDDEN),
        "self_attn.o_proj.weight": normal(HIDDEN, heads * dim, scale=0.004),
        "post_attention_layernorm.weight": ones.clone(),
        "mlp.gate_proj.weight": normal(MLP, HIDDEN),
        "mlp.up_proj.weight": normal(MLP, HIDDEN),
        "mlp.down_proj.weight": normal(HIDDEN, MLP, scale=0.004),
        "shared_head.norm.weight": load_file(str(target / "model.safetensors"))["model.norm.weight"],
        "shared_head.head.weight": normal(3, 3),
        "embed_tokens.weight": normal(3, 3),
    }
    (target / "nextn").mkdir()
    (target / "nextn" / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    save_file(
        {f"model.layers.{LAYERS}.{name}": tensor for name, tensor in tensors.items()},
        str(target / "nextn" / "model.safetensors"),
    )
    return target


@pytest.mark.parametrize("shape", [pytest.param((3, 1, 4), marks=pytest.mark.slow), (4, 3, 10)], ids=["chain", "tree"])
def test_a_method_of_another_family_drafts_through_the_same_rounds(
    pair: Pair, target_with_nextn: Path, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy answers in float32 are those without a draft, and drafts are accepted: of a module that guesses, one in 96
    would be."""
    monkeypatch.setitem(METHODS, "nextn", (NextN,))
    plain = Pair(target_with_nextn, pair.eagle, pair.eagle3, pair.prompts)

    def answers(speculative: SpeculativeConfig | None) -> list[Request]:
        with local_engine(plain.spec(speculative)) as engine:
            return engine.generate(pair.prompts, SamplingParams(24, 0.0), 4)

    drafted = answers(SpeculativeConfig("", "nextn", *shape))  # type: ignore[arg-type]
    assert [request.output for request in drafted] == [request.output for request in answers(None)]
    histogram = torch.tensor([request.acceptance_histogram for request in drafted]).sum(0).tolist()
    accepted = sum(k * rounds for k, rounds in enumerate(histogram)) / sum(histogram)
    assert accepted > 0.5, f"rounds by accepted drafts: {histogram}"


def test_the_example_refuses_a_draft_of_another_target(target_with_nextn: Path, tmp_path: Path) -> None:
    spec = spec_of(target_with_nextn)
    target = read_target_config(spec.worker.model, 1)
    raw = read_config_json(f"{target_with_nextn}/nextn") | {"hidden_size": 2 * HIDDEN}
    with pytest.raises(ValueError, match=f"hidden_size={2 * HIDDEN}: must be the target's {HIDDEN}$"):
        NextN.read(str(tmp_path), raw, target)


def test_a_method_may_find_its_checkpoint_with_the_target(
    target_with_nextn: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "nextn", (NextN,))
    spec = spec_of(target_with_nextn)
    draft = read_draft("nextn", "", spec.worker.model.path, read_target_config(spec.worker.model, 1))
    assert draft.path == f"{target_with_nextn}/nextn"


def test_every_method_can_be_configured() -> None:
    assert set(get_args(Method)) == {*METHODS, "suffix"}  # suffix has no checkpoint


def test_a_method_that_does_not_exist_is_refused_with_those_that_do(pair: Pair) -> None:
    spec = spec_of(pair.target)
    with pytest.raises(
        ValueError,
        match=r"^speculative.method=medusa: does not exist; choose one of eagle, eagle3, mtp, .*, dflash2, domino$",
    ):
        read_draft("medusa", str(pair.eagle), str(pair.target), read_target_config(spec.worker.model, 1))


def test_a_checkpoint_of_no_known_method_is_refused_with_those_that_exist(pair: Pair, tmp_path: Path) -> None:
    draft = edited(pair.eagle, tmp_path / "d", architectures=["MedusaModel"])
    spec = spec_of(pair.target)
    with pytest.raises(
        ValueError,
        match=r"d \(architecture MedusaModel\) belongs to no known method; known are eagle, .*, dflash2, domino$",
    ):
        read_draft("eagle3", str(draft), str(pair.target), read_target_config(spec.worker.model, 1))
