"""Adapters in the forms that trainers and versions of peft publish: each is served as peft merges it, or refused by
name with a remedy."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from aerie.speculative.build import check_weights, local_engine, plan_engine
from aerie.workers.config import LoraConfig
from aerie.workers.lora.adapter_config import read_adapter_config
from tests.speculative.adapters.conftest import Adapted, of
from tests.speculative.adapters.test_adapter_files import spec_of
from tests.speculative.conftest import EOS
from tests.support.slow import slow
from tests.support.targets.adapters import merged_tokens
from tests.support.tiny_models import make_target

Rename = Callable[[str], str]
PEFT_0_2: dict[str, Any] = {
    "bias": "none",
    "enable_lora": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "lora_alpha": 16,
}
PEFT_0_2 |= {"lora_dropout": 0.05, "merge_weights": False, "modules_to_save": None, "peft_type": "LORA", "r": 4}
PEFT_0_2 |= {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "base_model_name_or_path": "a/b"}
PEFT_0_4: dict[str, Any] = {
    "auto_mapping": None,
    "init_lora_weights": True,
    "layers_pattern": None,
    "layers_to_transform": None,
}
PEFT_0_4 |= {"revision": None} | {name: PEFT_0_2[name] for name in PEFT_0_2.keys() - {"enable_lora", "merge_weights"}}
PEFT_0_10: dict[str, Any] = PEFT_0_4 | {
    "alpha_pattern": {},
    "rank_pattern": {},
    "loftq_config": {},
    "megatron_config": None,
}
PEFT_0_10 |= {"megatron_core": "megatron.core", "layer_replication": None, "use_dora": False, "use_rslora": False}
PEFT_0_18: dict[str, Any] = PEFT_0_10 | {"alora_invocation_tokens": None, "arrow_config": None, "corda_config": None}
PEFT_0_18 |= {"ensure_weight_tying": False, "eva_config": None, "exclude_modules": None, "lora_bias": False}
PEFT_0_18 |= {"peft_version": "0.18.1", "qalora_group_size": 16, "target_parameters": None, "use_qalora": False}
PEFT_0_18 |= {"trainable_token_indices": None}
PEFT_0_21 = PEFT_0_18 | {"lora_ga_config": None, "kasa_config": None, "velora_config": None, "use_bdlora": None}
TORCHTUNE = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "output_proj"], "peft_type": "LORA"}
EVA = {"init_lora_weights": "eva", "eva_config": {"rho": 2.0, "tau": 0.99, "adjust_scaling_factors": True}}


def same(name: str) -> str:
    return name


def named(name: str) -> str:
    """As a training state is saved, with the adapter's name."""
    return name.replace(".weight", ".default.weight")


def bare(name: str) -> str:
    return name.removeprefix("base_model.model.")


SERVED: dict[str, tuple[dict[str, Any], Rename]] = {
    "peft 0.2": (PEFT_0_2, same),
    "peft 0.4": (PEFT_0_4, same),
    "peft 0.10": (PEFT_0_10, same),
    "peft 0.18": (PEFT_0_18, same),
    "peft 0.21": (PEFT_0_21, same),
    "torchtune": (TORCHTUNE, same),
    "axolotl": (PEFT_0_18 | {"target_modules": "all-linear", "lora_dropout": 0}, same),
    "unsloth": (PEFT_0_18 | {"target_modules": r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?)"}, same),
    "llama-factory": (PEFT_0_10 | {"target_modules": ["up_proj", "q_proj"], "rank_pattern": None}, same),
    "layers": (PEFT_0_18 | {"layers_to_transform": [0, 1, 2, 3], "layers_pattern": "layers"}, same),
    "eva": (PEFT_0_18 | EVA, same),
    "orthogonal": (PEFT_0_18 | {"init_lora_weights": "orthogonal"}, same),
    "gaussian": (PEFT_0_18 | {"init_lora_weights": "gaussian"}, same),
    "patterns": (PEFT_0_18 | {"r": 9, "rank_pattern": {r"^model.layers.\d+.(mlp|self_attn).\w+": 4}}, same),
    "named": (PEFT_0_18, named),
    "bare": (PEFT_0_18, bare),
}


def written(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], **files: str) -> str:
    """Write an adapter's folder. files: others, by the name without its ending `.json`."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text)
    return str(folder)


def small(adapted: Adapted) -> dict[str, Tensor]:
    """Matrices of rank 4 in all layers, whose alpha is 16."""
    tensors: dict[str, Tensor] = load_file(f"{adapted.adapters['small']}/adapter_model.safetensors")
    return tensors


def test_published_forms_are_served_as_peft_merges_them(adapted: Adapted, tmp_path: Path) -> None:
    """One adapter in many forms, beside tokenizer files that trainers save with it."""
    folders = {
        name: written(
            tmp_path / str(i),
            config,
            {rename(key): tensor for key, tensor in small(adapted).items()},
            added_tokens='{"<new>": 1000}',
            tokenizer_config='{"chat_template": "other"}',
        )
        for i, (name, (config, rename)) in enumerate(SERVED.items())
    }
    prompt = adapted.pair.prompts[0]
    with local_engine(adapted.spec(lora=LoraConfig(folders, 4, 16))) as engine:
        requests = engine.generate([prompt] * len(folders), [of(name) for name in folders])
    assert {name: r.output for name, r in zip(folders, requests, strict=True)} == dict.fromkeys(
        folders, adapted.expected["small"][0]
    )


@pytest.mark.filterwarnings("ignore:(PiSSA|OLoRA) changes the base weights")  # peft
@pytest.mark.parametrize("start", ["pissa", "olora", *slow("pissa_niter_2", "orthogonal", "mica")])
def test_adapters_that_began_on_a_changed_base_are_served_once_converted(tmp_path: Path, start: str) -> None:
    """peft's conversion doubles the rank; without it the adapter is refused."""
    target = make_target(tmp_path / "target", num_hidden_layers=2)
    base: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    torch.manual_seed(3)
    settings: Any = {"target_modules": "all-linear", "init_lora_weights": start}
    model: Any = get_peft_model(base, PeftConfig(r=4, lora_alpha=8, **settings))
    began, changes_base = tmp_path / "began", start not in ("orthogonal", "mica")
    model.peft_config["default"].init_lora_weights = True  # of the saved start, as peft's conversion asks for
    model.save_pretrained(began)
    model.peft_config["default"].init_lora_weights = start
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.add_(torch.randn(parameter.shape) * 0.3)
    model.save_pretrained(tmp_path / "raw")
    folder = tmp_path / "raw"
    if changes_base:
        with pytest.raises(ValueError, match=f"init_lora_weights={start}: was trained on a changed base; save it with"):
            read_adapter_config(folder)
        folder = tmp_path / "converted"
        model.save_pretrained(folder, path_initial_model_for_weight_conversion=str(began))
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == 8
    prompts = [[5, 6, 7, 8, 9], [11, 12]]
    expected = merged_tokens(target, folder, prompts, 12, EOS)
    assert expected != merged_tokens(target, None, prompts, 12, EOS)
    with local_engine(spec_of(target, LoraConfig({"a": str(folder)}))) as engine:
        assert [request.output for request in engine.generate(prompts, of("a"))] == expected


U = "base_model.model.model.layers.0.mlp.up_proj"
V = "base_model.model.model.visual.blocks.0.attn.qkv"
HEAD, EMBEDDING = "base_model.model.lm_head", "base_model.model.model.embed_tokens"
MERGED = r"merge it into its base \(peft's merge_and_unload\), and serve that"


def pair(module: str, outputs: int = 64, rank: int = 4) -> dict[str, Tensor]:
    return {f"{module}.lora_A.weight": torch.ones(rank, 64), f"{module}.lora_B.weight": torch.ones(outputs, rank)}


def every(rename: Rename) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {rename(name): tensor for name, tensor in tensors.items()}


def more(added: dict[str, Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: tensors | added


# changed fields, changed tensors, and what the refusal says
REFUSED: dict[str, tuple[dict[str, Any], Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "two adapters": (
        {},
        lambda tensors: tensors | {key.replace(".weight", ".ref.weight"): 2 * each for key, each in tensors.items()},
        r"layers.0.mlp.down_proj.lora_A(.ref)?.weight is a second lora_A of its module; save one adapter",
    ),
    "vision tower": ({}, more(pair(V)), f"visual.blocks.0.attn.qkv is of a layer .* change down_proj, .*{MERGED}"),
    "tied head": ({"modules_to_save": ["lm_head", "embed_tokens"], "ensure_weight_tying": True}, more({}), MERGED),
    "modules": (
        {"modules_to_save": ["lm_head"]},
        more({}),
        r"matrices of lm_head and embed_tokens are \(target_modules",
    ),
    "saved head": (
        {},
        more({f"{HEAD}.weight": torch.ones(96, 64)}),
        f"lm_head.weight differs from the base's .*{MERGED}",
    ),
    "trained base": (
        {},
        more({f"{EMBEDDING}.base_layer.weight": torch.ones(96, 64)}),
        f"embed_tokens.base_layer.weight differs from the base's .*{MERGED}",
    ),
    "new tokens": (
        {},
        more({f"{EMBEDDING}.weight": torch.ones(98, 64)}),
        rf"has shape \(98, 64\), the base's is \(96, 64\): embeddings of new tokens, {MERGED}",
    ),
    "saved norm": (
        {},
        more({f"{EMBEDDING.replace('embed_tokens', 'norm')}.weight": torch.ones(64)}),
        "is not a matrix of",
    ),
    "short vocabulary": ({}, more(pair(HEAD, 95)), r"lm_head \(lora_B\) has shape \(95, 4\), the layer has 96 outputs"),
    "trained tokens": (
        {},
        more({f"{EMBEDDING}.token_adapter.trainable_tokens_delta": torch.ones(2, 64)}),
        f"trainable_tokens_delta is not a matrix .*{MERGED}",
    ),
    "vocabulary": (
        {},
        more(
            {
                f"{EMBEDDING}.lora_embedding_{side}": torch.ones(shape)
                for side, shape in (("A", (4, 95)), ("B", (64, 4)))
            }
        ),
        r"embed_tokens \(lora_A\) has shape \(4, 95\), the layer has 96 inputs",
    ),
    "magnitudes": ({}, more({f"{U}.lora_magnitude_vector": torch.ones(96)}), f"magnitude_vector is not .*{MERGED}"),
    "adapter's bias": ({}, more({f"{U}.lora_B.bias": torch.ones(96)}), f"lora_B.bias is not a matrix .*{MERGED}"),
    "expert": ({}, more(pair(U.replace("up", "experts.3.up"))), f"mlp.experts.3.up_proj is of a layer .*{MERGED}"),
    "parameters": (
        {},
        more(pair(U.replace("up_proj", "experts.base_layer")) | pair(U.replace("up_proj", "experts"))),
        f"mlp.experts.base_layer is of a layer .*{MERGED}",
    ),
    "stacked": ({}, more(pair(U.replace("up_proj", "gate_up_proj"), 192)), f"gate_up_proj is of a layer .*{MERGED}"),
    "compiled": (
        {},
        every(lambda name: name.replace("base_model.model.", "base_model.model._orig_mod.")),
        "_orig_mod.model.layers",
    ),
    "FSDP": ({}, every(lambda name: name.replace(".mlp", "._fsdp_wrapped_module.mlp")), "_fsdp_wrapped_module"),
    "MLX": ({}, every(lambda name: name.replace("lora_A.weight", "lora_a")), "lora_a is not a matrix of an adapter"),
    "kohya": ({}, every(lambda name: name.replace("lora_A", "lora_down")), "lora_down.weight is not a matrix"),
    "reward model": ({"task_type": "SEQ_CLS", "modules_to_save": ["score"]}, more({}), r"modules_to_save=\['score'\]"),
    "LoftQ": ({"init_lora_weights": "loftq"}, more({}), f"init_lora_weights=loftq: .*; {MERGED}"),
    "LoRA-GA": (
        {"init_lora_weights": "lora_ga"},
        more({}),
        "init_lora_weights=lora_ga: .*; save it with peft's path_initial",
    ),
    "patterns": ({"rank_pattern": ["q_proj"]}, more({}), r"rank_pattern=\['q_proj'\]: must be an object of names"),
    "ranks": ({"rank_pattern": {"q_proj": "8"}}, more({}), "q_proj=8: a rank must be an integer of at least 1"),
    "no kind": ({"peft_type": None}, more({}), "peft_type=None: .* add peft_type: LORA if peft's"),
    "AdaLoRA": ({"peft_type": "ADALORA"}, more({}), f"peft_type=ADALORA: only LORA is served; {MERGED}"),
    "mlx_lm": (
        {"peft_type": None, "fine_tune_type": "lora", "lora_parameters": {}},
        more({}),
        r"is an adapter of MLX; merge it into its base \(mlx_lm.fuse",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_published_forms_are_refused_with_a_remedy(adapted: Adapted, tmp_path: Path, case: str) -> None:
    fields, change, message = REFUSED[case]
    folder = written(tmp_path / "a", PEFT_0_21 | fields, change(small(adapted)))
    spec = adapted.spec(lora=LoraConfig({"odd": folder}, 2, 64))
    with pytest.raises(ValueError, match=message) as refusal:
        check_weights(spec, plan_engine(spec))
    assert str(refusal.value).startswith("lora.modules.odd: ")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adapter_model.bin", "save it with safe_serialization=True: pickles are not read"),
        ("adapter_model-00001-of-00002.safetensors", r"save it with peft's save_pretrained, in one file"),
        ("adapters.safetensors", r"save it with peft's save_pretrained, in one file"),
    ],
)
def test_other_weight_files_are_named_with_a_remedy(adapted: Adapted, tmp_path: Path, name: str, message: str) -> None:
    folder = Path(written(tmp_path / "a", PEFT_0_21, small(adapted)))
    (folder / "adapter_model.safetensors").rename(folder / name)
    spec = adapted.spec(lora=LoraConfig({"odd": str(folder)}, 2, 64))
    with pytest.raises(ValueError, match=f"has no adapter_model.safetensors, but {name}; {message}"):
        check_weights(spec, plan_engine(spec))


@pytest.mark.parametrize("name", ["new_embeddings.safetensors", "new_embeddings.bin"])
def test_embeddings_of_new_tokens_are_not_ignored(adapted: Adapted, tmp_path: Path, name: str) -> None:
    """Files that vLLM reads beside an adapter."""
    folder = Path(written(tmp_path / "a", PEFT_0_21, small(adapted)))
    (folder / name).write_bytes(b"")
    with pytest.raises(ValueError, match=f"{name}: embeddings of new tokens are not served; {MERGED}"):
        read_adapter_config(folder)


def test_fields_of_later_versions_are_named_in_the_log(
    adapted: Adapted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A field may change what a layer computes, or be a harmless default: so it is neither refused nor unnoticed."""
    config = PEFT_0_21 | {"use_newest": True, "newest_config": {"a": 1}, "newest_size": None}
    folder = written(tmp_path / "a", config, small(adapted))
    with caplog.at_level(logging.WARNING):
        read_adapter_config(folder)
    assert "fields newest_config, use_newest are not known here" in caplog.text
    caplog.clear()
    for i, (fields, _) in enumerate(SERVED.values()):
        read_adapter_config(written(tmp_path / f"known{i}", fields, {}))
    for path in adapted.adapters.values():
        read_adapter_config(path)
    assert not caplog.text, "of every version until now"
