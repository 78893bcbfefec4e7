"""With dummy weights and random prompts the routers of the measured models choose as many experts as uniform choices
would, because floors count those, and a round over fewer would be faster than any real one."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.kernels.experts.route import RouterLogits
from aerie.workers.layers.routing import Router
from aerie.workers.scheduling.plan import SamplingParams
from tests.bench.models.configured import CONFIGS
from tests.bench.prompts import random_prompts
from tests.bench.round import Setting, engine_spec, local_engine, timed

BATCH, SETTING = 12, Setting(prompt_tokens=48, output_tokens=6)
# Width apart, the models as they are: fewer layers, a small vocabulary.
SMALL = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 64, "vocab_size": 4096}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def write_small(folder: Path, name: str) -> dict[str, Any]:
    """The model's config.json with five layers of small width in folder/target; the weights are kept unquantised."""
    raw = dict(CONFIGS[name])
    del raw["vocab_size"]
    raw |= SMALL | {"num_hidden_layers": 5} | ({} if "kv_lora_rank" in raw else HEADS)
    raw |= {"layer_types": raw["layer_types"][:5]} if "layer_types" in raw else {}
    raw.pop("quantization_config", None)
    (folder / "target").mkdir()
    (folder / "target" / "config.json").write_text(json.dumps(raw | {"eos_token_id": 1, "pad_token_id": 1}))
    return raw


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-oss-20b", "glm-4.5-air", "qwen3.5-35b-a3b", "dsv3-rank"])
def test_routers_of_dummies_spread(name: str, tmp_path: Path) -> None:
    raw = write_small(tmp_path, name)
    total = next(raw[key] for key in ("num_local_experts", "n_routed_experts", "num_experts") if key in raw)
    uniform = total * (1 - (1 - raw["num_experts_per_tok"] / total) ** BATCH)
    distinct: list[int] = []

    def count(module: torch.nn.Module, _: object, out: object) -> None:
        if isinstance(module, Router):
            assert isinstance(out, RouterLogits)
            if out.values.shape[-2] == BATCH:
                distinct.append(out.choose()[0].unique().numel())

    spec = engine_spec(tmp_path, "plain", BATCH, SETTING, 1, cuda_graphs=False)
    spec = dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, measure_costs=False))  # 13 s on a CPU
    with local_engine(spec) as engine:
        prompts = random_prompts(spec.worker.model, BATCH, SETTING.prompt_tokens)
        hook = torch.nn.modules.module.register_module_forward_hook(count)
        try:
            timed(engine, prompts, SamplingParams(SETTING.output_tokens, 0.0))
        finally:
            hook.remove()
    assert sum(distinct) / len(distinct) > 0.85 * uniform
