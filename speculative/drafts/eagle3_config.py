"""Reads config.json of published EAGLE-3 heads, and refuses unsupported keys; layout and weight names of their
checkpoints, shared by serving (`aerie.speculative.drafts.eagle3`) and training (`aerie.speculative.training.eagle3`).

There are three formats. SafeAILab's and SpecForge's is flat; NVIDIA's has more keys in `eagle_config`; RedHat's
`speculators` has the layers' keys in `transformer_layer_config`."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aerie.speculative.drafts.config import read_section, refuse_unknown, speculators_layers
from aerie.speculative.drafts.drafter import IGNORED_WEIGHTS, layer_names, same_names
from aerie.speculative.drafts.recognition import draft_architecture
from aerie.workers.models.config_fields import ids_of, section_of, size_of
from aerie.workers.models.name_map import NameMap

# Architecture of the layers, by transformer_layer_config.model_type.
_SPECULATORS_LAYERS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Keys that change the module, each with the only value that is supported.
_ONLY: dict[str, Any] = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "eh_proj_before_attn": False,
    "parallel_draft_step": 1,
    "parallel_drafting": False,
    "logit_scale": 1.0,
    "partial_rotary_factor": 1.0,
    "is_causal": True,
    "mask_token_id": None,
    "block_size": None,
    "kv_lora_rank": None,
    "num_experts": None,
    "num_local_experts": None,
    "n_routed_experts": None,
}

# Keys that may be true, an object or a list: read here or by `aerie.workers.models.llama`, or without effect on
# inference.
_KNOWN = {
    *("norm_before_residual", "norm_before_fc", "fc_norm", "use_aux_norm", "norm_output", "return_hidden_post_norm"),
    *("use_aux_hidden_state", "eagle_aux_hidden_state_layer_ids", "eagle_config", "transformer_layer_config"),
    *("architectures", "attention_bias", "mlp_bias", "bias", "tie_word_embeddings", "use_sliding_window"),
    *("layer_types", "rope_scaling", "rope_parameters", "quantization_config", "eos_token_id"),
    *("speculators_config", "embed_requires_grad", "has_no_defaults_at_init", "has_lm_head", "use_cache"),
    *("return_dict", "auto_map", "id2label", "label2id", "parallel_draft_heads_num_layers"),
}


@dataclass(frozen=True)
class HeadFlags:
    """Differences from the paper's head.

    norm_before_residual: the residual stream starts with the normalised feature (speculators).
    norm_before_fc: one norm over the concatenated captured layers, before their projection (gpt-oss heads).
    fc_norm: one norm per captured layer before the projection (EAGLE-3.1, arXiv 2605.09992).
    norm_output: the recurrent state is the output of the final norm, which the vocabulary head reads (EAGLE-3.1).
    """

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


def is_speculators(raw: Mapping[str, Any]) -> bool:
    return "transformer_layer_config" in raw


def layers_config(path: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of the head's layers, in the format of their model family.

    Raises ValueError, naming key and remedy, for another family or an unsupported key.
    """
    source = f"draft {path}"
    refuse_unknown(source, raw, _ONLY, _KNOWN)
    read_section(source, raw, "eagle_config", _ONLY, _KNOWN, strict=True)
    if is_speculators(raw):
        layers = speculators_layers(source, raw, _ONLY, _KNOWN, _SPECULATORS_LAYERS)
    else:
        _refuse_other_family(source, draft_architecture(raw))
        layers = {**raw, "architectures": [_flat_architecture(raw)]}
    _refuse_windows(source, layers)
    return layers


def read_flags(path: str, raw: Mapping[str, Any]) -> HeadFlags:
    """Read the flags, first from `eagle_config`, where NVIDIA's heads have them. Raises ValueError for a flag that is
    not a boolean."""
    fields = {**raw, **section_of(raw, "eagle_config", f"draft {path}")}

    def flag(name: str, *others: str, default: bool = False) -> bool:
        values = [(key, fields[key]) for key in (name, *others) if fields.get(key) is not None]
        for key, value in values:
            if not isinstance(value, bool):
                raise ValueError(f"draft {path}: {key}={value!r} must be true or false; set the trained value")
        return any(value for _, value in values) if values else default

    return HeadFlags(
        # speculators heads without this key were trained with it; vLLM serves them so, too
        norm_before_residual=flag("norm_before_residual", default=is_speculators(raw)),
        norm_before_fc=flag("norm_before_fc"),
        fc_norm=flag("fc_norm", "use_aux_norm"),
        norm_output=flag("norm_output", "return_hidden_post_norm"),
    )


def reads_captured_layers(raw: Mapping[str, Any]) -> bool:
    """Whether the head reads captured layers, or only the target's final hidden state."""
    fields = {**raw, **(raw.get("eagle_config") or {})}
    return fields.get("use_aux_hidden_state") is not False


def _flat_architecture(raw: Mapping[str, Any]) -> str:
    """Return the architecture of the layers. A head for Qwen3 has Llama's layers unless its config.json says
    otherwise."""
    architecture = draft_architecture(raw)
    has_qk_norm = "qwen3" in architecture.lower() and "qwen3vl" not in architecture.lower()
    return "Qwen3ForCausalLM" if has_qk_norm else "LlamaForCausalLM"


def _refuse_other_family(source: str, architecture: str) -> None:
    known = ("llama", "qwen", "eagle3speculator", "eagle3draftmodel", "eagle3model")
    if not any(name in architecture.lower() for name in known):
        raise ValueError(
            f"{source}: architectures={[architecture]}: heads with layers of this family are not supported; use a head "
            "with Llama's or Qwen3's layers"
        )


def _refuse_windows(source: str, layers: Mapping[str, Any]) -> None:
    declared = layers.get("layer_types") or []
    kinds = {str(kind) for kind in (declared if isinstance(declared, list) else [declared])} - {"full_attention"}
    if kinds:
        raise ValueError(
            f"{source}: layer_types has {', '.join(sorted(kinds))}, which is not supported; use a head with full "
            "attention in every layer"
        )


ARCHITECTURE = "LlamaForCausalLMEagle3"
MIN_TARGET_LAYERS = 7  # with fewer layers, `default_capture` repeats one

_NUMBERED_LAYER = re.compile(r"(?:layers|midlayer)\.(\d+)\.")
_ADDITIONAL_LAYER = re.compile(r"additional_layers\.(\d+)\.")
_AUX_NORMS = ("aux_norm_low.", "aux_norm_mid.", "aux_norm_high.")  # former names of fc_norm


def default_capture(num_layers: int) -> tuple[int, int, int]:
    """Return EAGLE-3's default for the target's layers whose input is captured."""
    return 2, num_layers // 2, num_layers - 3


def layer_ids(capture: tuple[int, ...]) -> list[int]:
    """Return `eagle_aux_hidden_state_layer_ids` of config.json for `capture`. An id names the layer before, whose
    output is the captured layer's input."""
    return [layer - 1 for layer in capture]


def captured_layers(path: str, raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the target's layers whose input a draft reads; `num_layers` stands for the last layer's output. Raises
    ValueError if the target does not have them.

    Checkpoints name layers by their output or, like `speculators` and some others, by their input. No draft reads the
    output of layer 0, so ids that start with 1 name outputs, and others inputs. (SGLang decides in the same way since
    pull request 25454.)
    """
    source, key = f"draft {path}", "eagle_aux_hidden_state_layer_ids"
    captured = ids_of(section_of(raw, "eagle_config", source), key, source) or ids_of(raw, key, source)
    if captured:
        counts_outputs = captured[0] == 1 and "transformer_layer_config" not in raw
        capture = tuple(i + counts_outputs for i in captured)
    else:
        capture = default_capture(num_layers)
    count = size_of(raw, "num_aux_hidden_states", source, len(capture))
    if len(capture) != count or len(set(capture)) != count or not all(0 <= i <= num_layers for i in capture):
        raise ValueError(
            f"draft {path}: captures the input of layers {capture}, which the target of {num_layers} layers does "
            f"not have {count} of; set eagle_config.eagle_aux_hidden_state_layer_ids in the draft's config, or use the "
            "head that was trained for this target"
        )
    return capture


def weight_names(num_layers: int) -> NameMap:
    """Map checkpoint names to parameters.

    The first layer is `midlayer` (SafeAILab, SpecForge), `layers.0` (speculators, vLLM, newer SGLang) or `midlayer.0`
    (TensorRT-LLM). Others are named likewise, or `additional_layers` (older SGLang). The norm before their attention is
    `input_layernorm` or `hidden_norm`.
    """
    rules = same_names("input_norm", "fc_norm.{i}") | layer_names("midlayer") | layer_names("layers.{layer}")
    aliases = [("model.", ""), ("layers.0.", "midlayer."), ("midlayer.0.", "midlayer.")]
    for i in range(1, num_layers):
        aliases += [(f"midlayer.{i}.", f"layers.{i}."), (f"additional_layers.{i - 1}.", f"layers.{i}.")]
        aliases += [(f"layers.{i}.hidden_norm.", f"layers.{i}.input_layernorm.")]
    aliases += [(name, f"fc_norm.{i}.") for i, name in enumerate(_AUX_NORMS)] + [("draft_id_to_target_id", "d2t")]
    return NameMap(rules, tuple(aliases), (*IGNORED_WEIGHTS, "verifier_lm_head.*"))


def count_layers(names: Iterable[str]) -> int:
    """Return the number of layers that the tensors of these names belong to."""
    names = [name.removeprefix("model.") for name in names]
    first = {0} if any(name.startswith(("midlayer.", "layers.")) for name in names) else set()
    numbered = {int(match[1]) for match in map(_NUMBERED_LAYER.match, names) if match}
    additional = {int(match[1]) + 1 for match in map(_ADDITIONAL_LAYER.match, names) if match}
    return len(first | numbered | additional)


def target_ids(offsets: Tensor) -> Tensor:
    """Return the target's token id of each draft id, [draft vocabulary] int64, from `d2t`."""
    return torch.arange(offsets.shape[0], device=offsets.device) + offsets.long()


def offsets(ids: Tensor) -> Tensor:
    """Return `d2t` for the result of `target_ids`."""
    return ids - torch.arange(ids.shape[0], device=ids.device)
