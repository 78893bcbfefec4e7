"""Reads config.json of published block drafts, and refuses unsupported keys.

Three formats: z-lab's (`dflash_config`), DeepSpec's (the same keys at the top level, `Qwen3DSparkModel`) and that of
`speculators` (layers in `transformer_layer_config`, `aux_hidden_state_layer_ids`). Keys and defaults are those of
z-lab's and `speculators`' (0.9) modelling code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aerie.attention.config import MIN_WINDOW
from aerie.speculative.drafts.config import read_section, refuse_unknown, speculators_layers
from aerie.speculative.drafts.recognition import draft_architecture
from aerie.speculative.tree_shape import MAX_COLUMNS
from aerie.workers.models.config import ModelConfig
from aerie.workers.models.config_fields import ids_of, number_of, section_of, size_of
from aerie.workers.models.llama import layers_with_windows

# Keys of `Scales`, which DFlash and DFlash2 have.
SCALES = frozenset(("input_embedding_scale", "output_multiplier", "final_logit_softcapping"))

# Keys that change the module, and the one supported value.
_ONLY: dict[str, Any] = {
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
    "partial_rotary_factor": 1.0,
    "projector_type": None,
    "num_experts": None,
    "num_local_experts": None,
    "n_routed_experts": None,
    "kv_lora_rank": None,
    "attn_output_gate": None,
    "fc_bias": None,
}

# Keys that may be true, an object or a list: read here or by `aerie.workers.models.llama`, or without effect on
# inference.
_KNOWN = {
    *("architectures", "dflash_config", "dspark_config", "transformer_layer_config", "speculators_config"),
    "layer_types",
    *("target_layer_ids", "aux_hidden_state_layer_ids", "sample_from_anchor", "sliding_window_non_causal"),
    *("is_causal", "use_sliding_window", "attention_bias", "tie_word_embeddings", "rope_scaling", "rope_parameters"),
    *("quantization_config", "eos_token_id", "use_cache", "return_dict", "auto_map", "id2label", "label2id"),
    *("embed_requires_grad", "has_no_defaults_at_init", "eagle_aux_hidden_state_layer_ids"),
    *("enable_confidence_head", "confidence_head_with_markov"),
}
_SECTIONS = ("dflash_config", "dspark_config")  # z-lab's, and SpecForge's, which repeats its keys at the top level
# JetSpec's loader reads `causal_head`, NeMo's training writes `causal`; both mean the same.
_CAUSAL_KEYS = ("causal", "causal_head")
_SECTION_KEYS = {"target_layer_ids", "mask_token_id", "block_size", "num_anchors", "sample_from_anchor", *_CAUSAL_KEYS}
# Layer descriptions of `speculators`; the module has Qwen3's layers for both.
_LAYERS = {"qwen3": "Qwen3ForCausalLM", "llama": "Qwen3ForCausalLM"}


@dataclass(frozen=True)
class LayerView:
    """The tokens that a block's rows attend to in one layer.

    causal: a row sees the block up to itself; else the whole block.
    context: number of tokens before the block that its first row sees; None for all.
    """

    causal: bool = False
    context: int | None = None

    def window(self, rows: int) -> int | None:
        """`DecodeBatch.window` for a block of `rows` rows.

        Approximate for two published variants, the causal window of `speculators` and the bidirectional one of z-lab.
        There, the exact window differs per row: the oldest token that a row sees is off by up to `rows - 1` positions.
        """
        return None if self.context is None else self.context + (1 if self.causal else rows)


@dataclass(frozen=True)
class Scales:
    """Factors that a head applies to the embedding and logits that it shares with the target.

    z-lab's code (`dflash_generate`, `compute_logits`) uses the target's embedding and vocabulary head without the
    scale, divisor or cap that the target (Gemma, Granite) applies; so do `speculators`, which copies both tables, and
    vLLM. DSpark heads have no factors.

    embedding: factor on the block's embedding.
    logits: factor on the logits.
    soft_cap: then, soft_cap * tanh(logit / soft_cap) replaces each logit; None: no cap.
    """

    embedding: float = 1.0
    logits: float = 1.0
    soft_cap: float | None = None


@dataclass(frozen=True)
class BlockForm:
    """The layout of a block.

    size: number of rows, including the newest token (anchor).
    mask_token_id: token of the other rows.
    from_anchor: if true, row k predicts token anchor + k + 1; else token anchor + k, and row 0 predicts nothing.
    views: a view per layer.
    """

    size: int
    mask_token_id: int
    from_anchor: bool
    views: tuple[LayerView, ...]

    @property
    def max_depth(self) -> int:
        """Tokens that a block drafts."""
        return self.size if self.from_anchor else self.size - 1


def is_speculators(raw: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in raw


def layers_config(path: str, raw: Mapping[str, Any], extra: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return config.json of the draft's layers, which are Qwen3's. `read_form` reads their windows.

    extra: further keys that the method reads.
    Raises ValueError, naming key and remedy, for an unsupported key.
    """
    source = f"draft {path}"
    refuse_unknown(source, raw, _ONLY, _KNOWN | extra)
    for section in _SECTIONS:
        read_section(source, raw, section, _ONLY, _SECTION_KEYS | extra, strict=True)
    if is_speculators(raw):
        layers = speculators_layers(source, raw, _ONLY, _KNOWN, _LAYERS)
    else:
        layers = {**raw, "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False}
    return {**layers, "use_sliding_window": False}


def read_form(path: str, raw: Mapping[str, Any], num_layers: int, vocab_size: int) -> BlockForm:
    """Return the layout of the draft's blocks. Raises ValueError, naming key, value and remedy."""
    source, keys = f"draft {path}", all_keys(path, raw)
    size = size_of(keys, "block_size", source, 8 if is_speculators(raw) else 16, max_value=MAX_COLUMNS)
    mask = size_of(keys, "mask_token_id", source, min_value=0)
    if mask >= vocab_size:
        raise ValueError(
            f"{source}: mask_token_id={mask}: the target's vocabulary has {vocab_size} tokens; use the head that was "
            "trained for this target"
        )
    name = str(raw.get("speculators_model_type") or draft_architecture(raw)).lower()
    # DeepSpec has no key for it, and Domino another one
    from_anchor = bool(keys.get("sample_from_anchor", keys.get("shift_label", "dspark" in name)))
    if size < 2 - from_anchor:
        raise ValueError(f"{source}: block_size={size}: must be at least 2; use a head that drafts")
    return BlockForm(size, mask, from_anchor, _views(path, raw, num_layers))


def read_scales(path: str, raw: Mapping[str, Any]) -> Scales:
    """Read the factors on embeddings and logits. Raises ValueError for one that is not a number above 0."""
    source, keys = f"draft {path}", all_keys(path, raw)
    cap = keys.get("final_logit_softcapping") or None
    return Scales(
        number_of(keys, "input_embedding_scale", source, 1.0),
        number_of(keys, "output_multiplier", source, 1.0),
        None if cap is None else number_of(keys, "final_logit_softcapping", source, 1.0),
    )


def read_capture(path: str, raw: Mapping[str, Any], target: ModelConfig) -> tuple[int, ...]:
    """Return the target's layers whose input the draft reads.

    `target_layer_ids` names layers by their output, `aux_hidden_state_layer_ids` of `speculators` by their input.
    Raises ValueError.
    """
    source, keys, count = f"draft {path}", all_keys(path, raw), target.num_layers
    made_for = size_of(raw, "num_target_layers", source, count)
    if made_for != count:
        raise ValueError(
            f"{source}: was made for a target of num_target_layers={made_for}, the target ({target.architecture}) has "
            f"{count} layers; use the head that was trained for this target"
        )
    key = "aux_hidden_state_layer_ids" if is_speculators(raw) else "target_layer_ids"
    capture = tuple(i + (not is_speculators(raw)) for i in ids_of(keys, key, source))
    if not capture or len(set(capture)) != len(capture) or not all(0 <= i < count for i in capture):
        raise ValueError(
            f"{source}: {key}={list(keys.get(key) or ())}: must name distinct layers before the last of the target's "
            f"{count}; use the head that was trained for this target"
        )
    return capture


def all_keys(path: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json and of its sections for the method. Raises ValueError for a section that is no
    object."""
    sections = (section_of(raw, section, f"draft {path}") for section in _SECTIONS)
    return {**raw, **{key: value for section in sections for key, value in section.items()}}


def _layers(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    return dict(section_of(raw, "transformer_layer_config", source)) if is_speculators(raw) else dict(raw)


def _views(path: str, raw: Mapping[str, Any], num_layers: int) -> tuple[LayerView, ...]:
    """Return each layer's attention within a block (causal or not) and its window, from `layer_types`. Raises
    ValueError."""
    source = f"draft {path}"
    layers = _layers(raw, source)
    sliding = layers_with_windows({**layers, "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": num_layers})
    default = ["sliding_attention" if i in sliding else "full_attention" for i in range(num_layers)]
    kinds = layers.get("layer_types") or default
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"{source}: layer_types={kinds}: must be full_attention or sliding_attention for each of "
            f"{num_layers} layers; correct the draft's config"
        )
    window = size_of(layers, "sliding_window", source, 0) if layers.get("use_sliding_window") else 0
    if 0 < window < MIN_WINDOW and "sliding_attention" in kinds:
        raise ValueError(
            f"{source}: sliding_window={window}: windows of fewer than {MIN_WINDOW} tokens are not supported; use a "
            "head with full attention"
        )
    views = {"full_attention": LayerView(_causal(raw, False, source))}
    if "sliding_attention" in kinds:
        views["sliding_attention"] = _sliding(raw, window, source)
    return tuple(views[kind] for kind in kinds)


def _sliding(raw: Mapping[str, Any], window: int, source: str) -> LayerView:
    """Return what a row of a layer with a sliding window sees. Both published formats count differently."""
    if not is_speculators(raw):  # z-lab: a row sees `window` tokens, including itself
        return LayerView(_causal(raw, True, source), window - 1 if window else None)
    if not window:
        raise ValueError(f"{source}: layer_types has sliding_attention, but sliding_window is not set; set it")
    both_ways = raw.get("sliding_window_non_causal", raw["speculators_model_type"] == "dflash2")
    return LayerView(not both_ways, window)  # `window` tokens before the block


def _causal(raw: Mapping[str, Any], default: bool, source: str) -> bool:
    """Whether a z-lab head's block is causal: `is_causal`, or a key of JetSpec's heads in `dflash_config`."""
    if is_speculators(raw):
        return default
    section = section_of(raw, "dflash_config", source)
    declared = {key: bool(section[key]) for key in _CAUSAL_KEYS if section.get(key) is not None}
    if len(set(declared.values())) > 1:
        raise ValueError(f"{source}: dflash_config={declared}: both keys mean the same; correct the draft's config")
    causal = next(iter(declared.values()), raw.get("is_causal"))
    return default if causal is None else bool(causal)
