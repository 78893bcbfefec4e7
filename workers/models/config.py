"""`ModelConfig`, the configuration of any target, and readers of fields of config.json that families share. Families
subclass it."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from aerie.attention.kv_cache.layout import HeadsLayout, LayerGroup
from aerie.attention.recurrent.layout import StateGroup
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.capability import Capability
from aerie.kernels.experts.route import Routing
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.linear import kv_head_span
from aerie.workers.layers.rotary import RopeConfig, yarn_magnitude
from aerie.workers.models.config_fields import (
    MAX_LAYERS,
    MAX_POSITIONS,
    architecture_of,
    flag_of,
    ids_of,
    number_of,
    section_of,
    size_of,
)
from aerie.workers.quantization.quant_method import QuantMethod
from aerie.workers.quantization.table import read_quant_method


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ABC):
    """Configuration of a target. Families add fields.

    num_heads: query heads.
    num_kv_heads, head_dim: sizes in the KV cache, for all ranks together.
    dtype: dtype of the checkpoint's unquantised weights.
    quant: quantisation of the linear layers.
    kv_scheme: the checkpoint's scheme for the KV cache (`aerie.workers.quantization.kv_scheme`).
    whole_experts: each rank has some whole experts (expert parallelism). A setting of the engine, not of the
        checkpoint; see `with_whole_experts`.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_eps: float
    tie_embeddings: bool
    dtype: torch.dtype
    quant: QuantMethod
    eos_token_ids: tuple[int, ...]
    kv_scheme: str | None = None
    whole_experts: bool = False

    @property
    def served_by(self) -> str | None:
        """Return the library that computes the model, for the log and `aerie plan`; None for Aerie's own classes."""
        return None

    def with_whole_experts(self, source: str) -> Self:
        """Return the configuration with `whole_experts`. Raises ValueError, naming `source`, if the model has no
        experts."""
        raise ValueError(f"expert_parallel=true: {source} has no experts; leave it out")

    @property
    def recorded_routing(self) -> Routing | None:
        """Return the routing of layers whose chosen experts can be recorded; None without such layers."""
        return None

    @abstractmethod
    def check_shards(self, tensor_parallel: int, source: str) -> None:
        """Raise ValueError, naming `source` and the sizes that work, if the model cannot be sharded over
        `tensor_parallel` ranks."""

    def check_device(self, device: Capability, dtype: torch.dtype, source: str) -> None:  # noqa: B027
        """Raise ValueError, naming `source`, if the model's layers have no kernels for `device` and `dtype`. Attention
        backends are checked elsewhere (`aerie.attention.registry`)."""

    @abstractmethod
    def kv_groups(self, tensor_parallel: int, dtype: torch.dtype) -> tuple[LayerGroup, ...]:
        """Return the layers with KV, grouped by layout on one rank. dtype: dtype of KV."""

    def score_rule(self, layer: int) -> ScoreRule:
        """Return how a layer of `kv_groups` turns scores into weights. Default: softmax of scores / sqrt(head_dim)."""
        return ScoreRule(self.head_dim**-0.5)

    def state_groups(self, tensor_parallel: int, dtype: torch.dtype) -> tuple[StateGroup, ...]:
        """Return the layers with a state of fixed size instead of KV, grouped by layout on one rank. Default: none."""
        return ()

    def num_kv_heads_per_rank(self, tensor_parallel: int) -> int:
        """Return the K/V heads of a rank; with more ranks than heads, several ranks have each head."""
        first, end = kv_head_span(self.num_kv_heads, TPGroup(0, tensor_parallel))
        return end - first

    @abstractmethod
    def linear_inputs(self, tensor_parallel: int) -> dict[str, int]:
        """Return the input sizes of one rank's linear layers, by config.json's names, without `expert_inputs`.
        Batch-invariant GEMMs require multiples of some size (`aerie.workers.runner.deterministic`)."""

    def expert_inputs(self, tensor_parallel: int) -> dict[str, int]:
        """Do `linear_inputs` for the routed experts' down projections. Default: none."""
        return {}


def head_groups(heads: Iterable[tuple[int, int]], tensor_parallel: int, dtype: torch.dtype) -> tuple[LayerGroup, ...]:
    """Return a model's first layers, grouped by layout on one rank.

    heads: (KV heads, head_dim) of each.
    dtype: dtype of KV.
    """
    layers: dict[HeadsLayout, list[int]] = {}
    for layer, (num_kv_heads, head_dim) in enumerate(heads):
        first, end = kv_head_span(num_kv_heads, TPGroup(0, tensor_parallel))
        layers.setdefault(HeadsLayout(end - first, head_dim, dtype), []).append(layer)
    return tuple(LayerGroup(tuple(which), layout) for layout, which in layers.items())


def check_cuts(
    tensor_parallel: int, source: str, heads: int, cut: Mapping[str, int], kv_heads: Iterable[int] = ()
) -> None:
    """Raise ValueError, naming `source` and the numbers of ranks that work, if `tensor_parallel` ranks cannot share
    the sizes of a model.

    heads: query heads.
    cut: other sizes that ranks share, by config.json's names.
    kv_heads: KV heads of the layers; of fewer heads than ranks, several ranks have each.
    """
    cut, kv_heads = {"num_attention_heads": heads} | dict(cut), sorted(set(kv_heads))

    def fits(size: int) -> bool:
        kv_fit = all(kv % size == 0 if kv >= size else size % kv == 0 for kv in kv_heads)
        return kv_fit and not any(total % size for total in cut.values())

    if not fits(tensor_parallel):
        named = [f"{name}={total}" for name, total in cut.items()]
        if kv_heads:
            named.insert(1, f"num_key_value_heads={', '.join(map(str, kv_heads))}")
        works = [n for n in range(1, heads + 1) if fits(n)]
        raise ValueError(
            f"tensor_parallel={tensor_parallel}: does not divide {source} ({', '.join(named)}); try one of {works}"
        )


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTIZATION = "quantization_config"
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "proportional")


def read_config_json(folder: str | Path) -> dict[str, Any]:
    """Read config.json of a checkpoint folder. Raises ValueError, naming the path, if it is missing or not an
    object."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"path={folder}: has no config.json; give the folder of a Hugging Face checkpoint") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); correct its permissions") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON ({error}); download the checkpoint again") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: must hold a JSON object; download the checkpoint again")
    quantization = None if config.get(QUANTIZATION) else _other_quantization(config, Path(folder))
    return config if quantization is None else config | {QUANTIZATION: quantization}


def _other_quantization(config: Mapping[str, Any], folder: Path) -> dict[str, Any] | None:
    """Return the quantisation settings that older exporters store elsewhere: compressed-tensors under another key,
    AutoGPTQ in a separate file."""
    compression = config.get("compression_config")
    if isinstance(compression, dict):
        return compression
    try:
        settings = json.loads((folder / "quantize_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return {"quant_method": "gptq", **settings} if isinstance(settings, dict) and "bits" in settings else None


# Fields of a model of images and text that also apply to its text part.
_OUTER_FIELDS = ("architectures", "quantization_config", "tie_word_embeddings", "dtype", "torch_dtype", "eos_token_id")


def text_part(config: dict[str, Any], source: str, text_first: bool = False) -> dict[str, Any]:
    """Return the part of config.json that describes the token decoder: text_config, or all of it.

    `_OUTER_FIELDS` that are not null in the whole model override the text part's. text_first: the text part's come
    first, except `architectures`.
    """
    text = section_of(config, "text_config", source)
    if not text:
        return config
    outer = {key: config[key] for key in _OUTER_FIELDS if config.get(key) is not None}
    if text_first:
        outer = {key: value for key, value in outer.items() if key == "architectures" or text.get(key) is None}
    return {**text, **outer}


def decoder_fields(config: Mapping[str, Any], source: str, architecture: str = "") -> dict[str, Any]:
    """Return the fields of `ModelConfig` that all own families read alike. architecture: if config.json names none."""
    return {
        "architecture": architecture_of(config, architecture),
        "hidden_size": size_of(config, "hidden_size", source),
        "num_layers": size_of(config, "num_hidden_layers", source, max_value=MAX_LAYERS),
        "num_heads": size_of(config, "num_attention_heads", source),
        "vocab_size": size_of(config, "vocab_size", source),
        "max_position": size_of(config, "max_position_embeddings", source, 2048, max_value=MAX_POSITIONS),
        "rms_eps": number_of(config, "rms_norm_eps", source, 1e-6),
        "tie_embeddings": flag_of(config, "tie_word_embeddings", source),
        "dtype": dtype_of(config),
        "quant": read_quant_method(config, source),
        "eos_token_ids": ids_of(config, "eos_token_id", source),
    }


def dtype_of(config: Mapping[str, Any]) -> torch.dtype:
    """Return the checkpoint's dtype; bfloat16 for unknown names."""
    return _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype") or "float32"), torch.bfloat16)


def rope_scaling_of(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Return the settings of RoPE besides rope_theta; empty if there are none."""
    return section_of(config, "rope_parameters", source) or section_of(config, "rope_scaling", source)


def rope_of(config: Mapping[str, Any], source: str) -> RopeConfig:
    """Return RoPE's settings. Raises ValueError, with the supported kinds, for any other kind of scaling."""
    scaling = rope_scaling_of(config, source)
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in ROPE_KINDS:
        raise ValueError(f"{source}: rope_type={kind!r} is not supported; it is one of {', '.join(ROPE_KINDS)}")
    theta = number_of(scaling, "rope_theta", source, number_of(config, "rope_theta", source, 10000.0))
    rope = _yarn_of(scaling, theta, source) if kind == "yarn" else _scaled_rope(scaling, theta, kind, source)
    interleaved = scaling.get("mrope_interleaved") is True
    return replace(rope, sections=_sections_of(scaling, source), interleaved=interleaved)


def _scaled_rope(scaling: Mapping[str, Any], theta: float, kind: str, source: str) -> RopeConfig:
    """Read the parameters of a scaled RoPE (linear, llama3, proportional and others)."""
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=number_of(scaling, "factor", source, 1.0),
        low_freq_factor=number_of(scaling, "low_freq_factor", source, 1.0),
        high_freq_factor=number_of(scaling, "high_freq_factor", source, 4.0),
        original_max_position=size_of(
            scaling, "original_max_position_embeddings", source, 8192, max_value=MAX_POSITIONS
        ),
        proportion=_proportion_of(scaling, source) if kind == "proportional" else 1.0,
    )


def with_mrope(text: Mapping[str, Any], sections: tuple[int, ...], interleaved: bool) -> dict[str, Any]:
    """Return the fields of a decoder with M-RoPE. sections: if the fields have none (`RopeConfig.sections`)."""
    key = "rope_parameters" if isinstance(text.get("rope_parameters"), dict) else "rope_scaling"
    scaling = text.get(key) or {}
    scaling = {"mrope_section": list(sections)} | (scaling if isinstance(scaling, dict) else {})
    return dict(text) | {key: scaling | {"mrope_interleaved": interleaved}}


def _sections_of(scaling: Mapping[str, Any], source: str) -> tuple[int, ...]:
    """Return `RopeConfig.sections`."""
    sections = scaling.get("mrope_section") or ()
    if sections and (len(sections) != 3 or not all(isinstance(size, int) and size > 0 for size in sections)):
        raise ValueError(f"{source}: config.json: mrope_section={sections!r}: must be three numbers; correct it")
    return tuple(sections)


def _proportion_of(scaling: Mapping[str, Any], source: str) -> float:
    share = number_of(scaling, "partial_rotary_factor", source, 1.0)
    if share > 1:
        raise ValueError(f"{source}: config.json: partial_rotary_factor={share:g}: must be at most 1; correct it")
    return share


def _yarn_of(scaling: Mapping[str, Any], theta: float, source: str) -> RopeConfig:
    """Read the parameters of YaRN (arXiv 2309.00071)."""
    for key in ("factor", "original_max_position_embeddings"):
        if scaling.get(key) is None:
            raise ValueError(f"{source}: rope_type='yarn' needs {key!r} in rope_scaling; download it again")
    factor = number_of(scaling, "factor", source, 1.0)
    whole, part = mscale_of(scaling, "mscale", source, 1.0), mscale_of(scaling, "mscale_all_dim", source)
    default = yarn_magnitude(factor, whole) / yarn_magnitude(factor, part)
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=size_of(scaling, "original_max_position_embeddings", source, max_value=MAX_POSITIONS),
        beta_fast=number_of(scaling, "beta_fast", source, 32.0),
        beta_slow=number_of(scaling, "beta_slow", source, 1.0),
        magnitude=number_of(scaling, "attention_factor", source, default),
        truncate=flag_of(scaling, "truncate", source, True),
    )


def rotated_dim_of(config: Mapping[str, Any], head_dim: int, source: str, default: float) -> int:
    """Return the number of rotated dimensions of a head, which are the first ones. default: their share if config.json
    has none."""
    if rope_scaling_of(config, source).get("rope_type") == "proportional":
        return head_dim  # `RopeConfig.proportion` says how many of them rotate
    factor = number_of(config, "partial_rotary_factor", source, default)
    factor = number_of(rope_scaling_of(config, source), "partial_rotary_factor", source, factor)
    rotated = int(head_dim * factor)
    if rotated % 2 or not 2 <= rotated <= head_dim:
        raise ValueError(
            f"{source}: config.json: partial_rotary_factor={factor:g} of head_dim={head_dim}: must give an even number "
            "from 2 to head_dim; correct it, or download the checkpoint again"
        )
    return rotated


def mscale_of(scaling: Mapping[str, Any], key: str, source: str, default: float = 0.0) -> float:
    """Return one of YaRN's factors; 0 means `default`, as in transformers."""
    return default if scaling.get(key) == 0 else number_of(scaling, key, source, default)
