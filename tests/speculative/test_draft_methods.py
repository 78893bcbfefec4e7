"""A draft method is a file and a row: one of another family than EAGLE drafts through the same rounds."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculative.config import Method, SpeculativeConfig
from speculative.drafts.method import DraftMethod, DraftModel
from speculative.drafts.registry import METHODS, read_draft
from speculative.local import local_engine
from tests.speculative.conftest import Pair
from tests.speculative.test_loading import edited, spec_of
from tests.support.tiny_models import HIDDEN, LAYERS, MLP, make_target
from workers.distributed.tp_group import TPGroup
from workers.layers.forward_context import ForwardContext
from workers.layers.linear import ReplicatedLinear
from workers.layers.norm import RMSNorm
from workers.layers.rotary import RotaryTable
from workers.models.config import ModelConfig, read_config_json
from workers.models.decoder import DecoderOutput
from workers.models.llama import LlamaConfig, make_layer, read_config
from workers.models.loading import read_target_config
from workers.models.name_map import NameMap
from workers.scheduling.plan import SamplingParams
from workers.scheduling.request import Request


@dataclass(frozen=True)
class NextN(DraftMethod):
    """A module that comes with its target, in a folder beside the target's weights."""

    name: ClassVar[str] = "nextn"
    model: LlamaConfig

    @classmethod
    def folder(cls, draft_path: str, target_path: str) -> str:
        return f"{target_path}/nextn"

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        return bool(raw.get("num_nextn_predict_layers"))

    @classmethod
    def read(cls, path: str, raw: Mapping[str, Any], target: ModelConfig) -> Self:
        return cls(path, read_config({**raw, "num_hidden_layers": 1}, path), target.vocab_size, ())

    def build(self, group: TPGroup, max_position: int, device: torch.device) -> "NextNModel":
        return NextNModel(self, group, max_position, device)

    @property
    def weight_names(self) -> NameMap:
        theirs = f"model.layers.{LAYERS}"
        rules = {
            "norm": f"{theirs}.shared_head.norm",
            "layer.self_attn.qkv": f"{theirs}.self_attn.{{part}}",
            "layer.mlp.gate_up": f"{theirs}.mlp.{{part}}",
            "layer.{block}.{module}": f"{theirs}.{{block}}.{{module}}",
            "layer.{norm}": f"{theirs}.{{norm}}",
            "{module}": f"{theirs}.{{module}}",
        }
        return NameMap(rules, ignored=(f"{theirs}.shared_head.head.weight", f"{theirs}.embed_tokens.weight"))


class NextNModel(DraftModel):
    """Its state is what left the last norm."""

    reads_last_layer: ClassVar[bool] = True

    def __init__(self, method: NextN, group: TPGroup, max_position: int, device: torch.device) -> None:
        super().__init__(method, group)
        self.rotary = RotaryTable(method.model.rope, method.model.head_dim, max_position, device)
        model = method.model
        self.enorm, self.hnorm, self.norm = (RMSNorm(model.hidden_size, model.rms_eps) for _ in range(3))
        self.eh_proj = ReplicatedLinear(2 * model.hidden_size, model.hidden_size, bias=False)
        self.layer = make_layer(model, 0, group)

    def features(self, output: DecoderOutput) -> Tensor:
        return output.hidden

    def keep(self, ids: Tensor, features: Tensor, context: ForwardContext) -> None:
        normed = self.layer.input_layernorm(self._input(ids, features))
        self.layer.self_attn.keep(normed, self.rotary.at(context.positions), context)

    def _input(self, ids: Tensor, hidden: Tensor) -> Tensor:
        x: Tensor = self.eh_proj(torch.cat((self.enorm(self.embed_tokens(ids)), self.hnorm(hidden)), dim=-1))
        return x

    def step(self, ids: Tensor, hidden: Tensor, context: ForwardContext) -> Tensor:
        residual = self._input(ids, hidden)
        angles = self.rotary.at(context.positions)
        added, residual = self.layer(self.layer.input_layernorm(residual), residual, angles, context)
        state, _ = self.norm.add(added, residual, self.group)
        return state

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits


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


@pytest.mark.parametrize("shape", [(3, 1, 4), (4, 3, 10)], ids=["chain", "tree"])
def test_a_method_of_another_family_drafts_through_the_same_rounds(
    pair: Pair, target_with_nextn: Path, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy answers in float32 are those without a draft, and drafts are accepted: of a module that guesses, one in 96
    would be."""
    monkeypatch.setitem(METHODS, "nextn", NextN)
    plain = Pair(target_with_nextn, pair.eagle, pair.eagle3, pair.prompts)

    def answers(speculative: SpeculativeConfig | None) -> list[Request]:
        with local_engine(plain.spec(speculative)) as engine:
            return engine.generate(pair.prompts, SamplingParams(24, 0.0), 4)

    drafted = answers(SpeculativeConfig("", "nextn", *shape))  # type: ignore[arg-type]
    assert [request.output for request in drafted] == [request.output for request in answers(None)]
    histogram = torch.tensor([request.acceptance_histogram for request in drafted]).sum(0).tolist()
    accepted = sum(k * rounds for k, rounds in enumerate(histogram)) / sum(histogram)
    assert accepted > 0.5, f"rounds by accepted drafts: {histogram}"


def test_a_method_may_find_its_checkpoint_with_the_target(
    target_with_nextn: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "nextn", NextN)
    spec = spec_of(target_with_nextn)
    draft = read_draft("nextn", "", spec.worker.model.path, read_target_config(spec.worker.model, 1))
    assert draft.path == f"{target_with_nextn}/nextn"


def test_every_method_can_be_configured() -> None:
    assert set(get_args(Method)) == set(METHODS)


def test_a_method_that_does_not_exist_is_refused_with_those_that_do(pair: Pair) -> None:
    spec = spec_of(pair.target)
    with pytest.raises(
        ValueError, match=r"^speculative.method=medusa: does not exist; choose one of eagle, eagle3, mtp$"
    ):
        read_draft("medusa", str(pair.eagle), str(pair.target), read_target_config(spec.worker.model, 1))


def test_a_checkpoint_of_no_known_method_is_refused_with_those_that_exist(pair: Pair, tmp_path: Path) -> None:
    draft = edited(pair.eagle, tmp_path / "d", architectures=["DFlashDraftModel"])
    spec = spec_of(pair.target)
    with pytest.raises(
        ValueError,
        match=r"d \(architecture DFlashDraftModel\) is of no method that exists; those are eagle, eagle3, mtp$",
    ):
        read_draft("eagle3", str(draft), str(pair.target), read_target_config(spec.worker.model, 1))
