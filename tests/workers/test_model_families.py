"""The registry of architectures, shown with a family that only these tests know: Qwen3's mixture of experts, computed
one expert after the other. It is a configuration, a feed-forward and a name map; nothing else is touched."""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from tests.workers.test_targets import by_transformers, by_us
from workers.config import ModelSource
from workers.distributed.tp_group import TPGroup
from workers.layers.decoder_layer import DecoderLayer, FeedForward
from workers.layers.linear import ReplicatedLinear, rank_span
from workers.layers.rotary import RotaryTable
from workers.layers.weighted import WeightedModule, WeightKey, check_shape
from workers.models.config import required_int
from workers.models.decoder import Decoder
from workers.models.family import ModelFamily
from workers.models.llama import LlamaConfig, make_attention, read_config
from workers.models.loading import read_target_config
from workers.models.name_map import NameMap
from workers.models.registry import ARCHITECTURES, family_of


@dataclass(frozen=True, kw_only=True)
class MoeConfig(LlamaConfig):
    num_experts: int
    experts_per_token: int


def read_moe_config(config: dict[str, Any], source: str) -> MoeConfig:
    dense = read_config({**config, "intermediate_size": required_int(config, "moe_intermediate_size", source)}, source)
    fields = {field.name: getattr(dense, field.name) for field in dataclasses.fields(dense)}
    experts = config.get("num_experts") or config["num_local_experts"]  # as transformers 5 writes it
    return MoeConfig(**fields, num_experts=experts, experts_per_token=int(config["num_experts_per_tok"]))


class Experts(WeightedModule):
    """gate_up [experts, 2 * size, hidden], down [experts, hidden, size], of this rank's columns of every expert."""

    def __init__(self, config: MoeConfig, group: TPGroup) -> None:
        super().__init__()
        self.span = rank_span(config.intermediate_size, group, "moe_intermediate_size")
        self.total, self.hidden, count = config.intermediate_size, config.hidden_size, config.num_experts
        self.gate_up = nn.Parameter(torch.empty(count, 2, self.span.size, self.hidden), requires_grad=False)
        self.down = nn.Parameter(torch.empty(count, self.hidden, self.span.size), requires_grad=False)

    def weight_keys(self) -> Iterator[WeightKey]:
        for expert in range(self.gate_up.shape[0]):
            for part in ("gate_proj", "up_proj", "down_proj"):
                yield WeightKey("weight", part, expert)

    def load(self, key: WeightKey, full: Tensor) -> None:
        mine = slice(self.span.first, self.span.end)
        if key.part == "down_proj":
            check_shape(full, (self.hidden, self.total))
            self.down.data[key.expert] = full[:, mine]
        else:
            check_shape(full, (self.total, self.hidden))
            self.gate_up.data[key.expert, ("gate_proj", "up_proj").index(key.part)] = full[mine]

    def fill_dummy(self, generator: torch.Generator) -> None:
        for parameter in (self.gate_up, self.down):
            parameter.data.normal_(0.0, 0.02, generator=generator)

    def forward(self, expert: int, x: Tensor) -> Tensor:
        gate, up = self.gate_up[expert]
        return (F.silu(x @ gate.t()) * (x @ up.t())) @ self.down[expert].t()


class MixtureOfExperts(FeedForward):
    def __init__(self, config: MoeConfig, group: TPGroup) -> None:
        super().__init__()
        self.gate = ReplicatedLinear(config.hidden_size, config.num_experts)
        self.experts = Experts(config, group)
        self.experts_per_token = config.experts_per_token

    def partial(self, x: Tensor) -> Tensor:
        weight, chosen = torch.softmax(self.gate(x).float(), -1).topk(self.experts_per_token, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            row, place = (chosen == expert).nonzero(as_tuple=True)
            out.index_add_(0, row, self.experts(expert, x[row]) * weight[row, place, None].to(x.dtype))
        return out


class MoeForCausalLM(Decoder):
    def __init__(
        self, config: MoeConfig, group: TPGroup, max_position: int, device: torch.device, capture: tuple[int, ...] = ()
    ) -> None:
        def layer(index: int) -> DecoderLayer:
            attention = make_attention(config, index, group, config.hidden_size)
            return DecoderLayer(config.hidden_size, config.rms_eps, attention, MixtureOfExperts(config, group), group)

        rotary = RotaryTable(config.rope, config.head_dim, max_position, device)
        super().__init__(config, group, rotary, map(layer, range(config.num_layers)), capture)


def moe_names(config: MoeConfig) -> NameMap:
    return NameMap(
        {
            "lm_head": "lm_head",
            "embed_tokens": "model.embed_tokens",
            "norm": "model.norm",
            "layers.{layer}.self_attn.qkv": "model.layers.{layer}.self_attn.{part}",
            "layers.{layer}.mlp.experts": "model.layers.{layer}.mlp.experts.{expert}.{part}",
            "layers.{layer}.{block}.{module}": "model.layers.{layer}.{block}.{module}",
            "layers.{layer}.{norm}": "model.layers.{layer}.{norm}",
        }
    )


MOE = ModelFamily(read_moe_config, MoeForCausalLM, moe_names)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=64,
        moe_intermediate_size=48,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        eos_token_id=1,
        bos_token_id=0,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("moe")
    Qwen3MoeForCausalLM(config).eval().save_pretrained(folder)
    return folder


def test_a_family_is_a_file_and_a_row(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with safe_open(str(checkpoint / "model.safetensors"), "pt") as file:
        assert "model.layers.2.mlp.experts.5.down_proj.weight" in file.keys()  # noqa: SIM118 - no mapping
    monkeypatch.setitem(ARCHITECTURES, "Qwen3MoeForCausalLM", lambda: MOE)
    assert by_us(checkpoint) == by_transformers(checkpoint)


def test_an_unknown_architecture_names_those_that_exist(checkpoint: Path, tmp_path: Path) -> None:
    known = "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"
    with pytest.raises(ValueError, match=f"architecture Qwen3MoeForCausalLM is not supported as a target; .* {known}$"):
        read_target_config(ModelSource(path=str(checkpoint)), 1)
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": None}))
    with pytest.raises(ValueError, match="architecture none is not supported"):
        read_target_config(ModelSource(path=str(tmp_path)), 1)


def test_every_row_of_the_registry_leads_to_a_family() -> None:
    for architecture in ARCHITECTURES:
        assert isinstance(family_of(architecture, "model x"), ModelFamily)
