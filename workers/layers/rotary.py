"""cos and sin tables of rotary position embedding (RoPE, arXiv 2104.09864), and settings that replace config.json's for
contexts longer than the checkpoint's (`model.rope_scaling`). The KV layout chooses the dimensions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aerie.kernels.rope.rope_store import Angles


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    kind:
        "linear" divides all frequencies by `factor`.
        "llama3" divides those of long wavelengths (Llama 3.1 model card).
        "yarn" (arXiv 2309.00071) divides frequencies with fewer than beta_slow turns in the original length, leaves
        those with more than beta_fast turns, and blends between.
        "proportional" (Gemma 4) rotates only the fastest dimensions, at the whole head's frequencies / `factor`. "none"
        rotates nothing (NoPE layers of Llama 4).
    truncate: round the bounds of YaRN's blend to whole dimensions.
    proportion: share of a head's dimensions that "proportional" rotates.
    magnitude: factor on cos and sin, so q . k is scaled by its square.
    sections: numbers of frequencies by which a token's frame, row and column rotate (M-RoPE, arXiv 2409.12191); empty:
        a token has one position.
    interleaved: whether the axes alternate from one frequency to the next; else each has a block of frequencies.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    magnitude: float = 1.0
    truncate: bool = True
    proportion: float = 1.0
    sections: tuple[int, ...] = ()
    interleaved: bool = False

    def axes(self, num_frequencies: int) -> list[int]:
        """Return the axis by which each frequency rotates."""
        if not self.interleaved:
            return [axis for axis, count in enumerate(self.sections) for _ in range(count)]
        ends = [3 * count for count in self.sections]
        return [i % 3 if i % 3 and i < ends[i % 3] else 0 for i in range(num_frequencies)]


class RotaryTable:
    """cos and sin for all positions: [max_position, head_dim / 2] float32 on `device`, even while models are built on
    the meta device."""

    def __init__(self, rope: RopeConfig, head_dim: int, max_position: int, device: torch.device) -> None:
        steps = frequencies(rope, head_dim)
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32, device="cpu"), steps)
        self._cos = (angles.cos() * rope.magnitude).to(device)
        self._sin = (angles.sin() * rope.magnitude).to(device)
        axes = rope.axes(angles.shape[1]) if sum(rope.sections) == angles.shape[1] else None
        self._axes = None if axes is None else torch.tensor(axes, dtype=torch.int64, device="cpu").to(device)

    def at(self, positions: Tensor) -> Angles:
        """Return the angles at positions [rows] int64, as table and index: the RoPE kernel looks them up
        (`KVLayout.store`). With positions [3, rows] of M-RoPE it is a new table with a row for each row."""
        if positions.dim() == 1:
            return Angles(self._cos, self._sin, positions)
        assert self._axes is not None, "only models with M-RoPE get three positions"
        own = positions[self._axes].T  # [rows, frequencies]
        rows = torch.arange(own.shape[0], device=positions.device)
        return Angles(self._cos.gather(0, own).contiguous(), self._sin.gather(0, own).contiguous(), rows)


def rotary_tables(
    ropes: Sequence[RopeConfig], head_dim: int, max_position: int, device: torch.device
) -> list[RotaryTable]:
    """Return a table per layer; layers with equal RoPE share one."""
    tables = {rope: RotaryTable(rope, head_dim, max_position, device) for rope in dict.fromkeys(ropes)}
    return [tables[rope] for rope in ropes]


def frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return [head_dim / 2] float32 radians per position, on the CPU."""
    steps = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    if rope.kind == "none":
        return torch.zeros_like(steps)
    if rope.kind == "linear":
        return steps / rope.factor
    if rope.kind == "proportional":
        steps[int(rope.proportion * head_dim // 2) :] = 0.0
        return steps / rope.factor
    if rope.kind == "llama3":
        return _llama3(steps, rope)
    if rope.kind == "yarn":
        return _yarn(steps, rope)
    return steps


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Divide frequencies of long wavelengths by `factor`; blend towards short ones (Llama 3.1 reference code). Unless
    high_freq_factor exceeds low_freq_factor, nothing is blended (Llama 4)."""
    above = rope.original_max_position / (2 * math.pi / frequencies) - rope.low_freq_factor
    width = rope.high_freq_factor - rope.low_freq_factor
    blend = (above / width).clamp(0.0, 1.0) if width > 0 else (above >= 0).float()
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Blend frequencies between two dimensions (reference code of arXiv 2309.00071, also used by DeepSeek; not rounded
    in gpt-oss)."""

    def dimension(turns: float) -> float:
        """Return the dimension with this number of turns in the original length."""
        return half * math.log(rope.original_max_position / (turns * 2 * math.pi)) / math.log(rope.theta)

    half = frequencies.shape[0]
    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    width = high - low or 0.001
    slowed = ((torch.arange(half, dtype=torch.float32, device="cpu") - low) / width).clamp(0.0, 1.0)
    return frequencies / rope.factor * slowed + frequencies * (1 - slowed)


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return the attention scale for a context that is `factor` times as long (arXiv 2309.00071, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


_EXTENDS_ORIGINAL = ("yarn", "llama3")  # kinds whose longest context is original_max_position_embeddings * factor


def with_rope_scaling(config: dict[str, Any], scaling: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return config.json with `scaling` in the settings of RoPE of its token decoder, and the longest context that
    follows from them. Raises ValueError for layers with different settings."""
    if not scaling:
        return config
    if isinstance(config.get("text_config"), dict):
        return config | {"text_config": with_rope_scaling(config["text_config"], scaling, source)}
    section = "rope_parameters" if isinstance(config.get("rope_parameters"), dict) else "rope_scaling"
    present = config.get(section) or {}
    if any(isinstance(value, Mapping) for value in present.values()):
        raise ValueError(
            f"model.rope_scaling={dict(scaling)}: the layers of {source} have different settings of RoPE; change "
            "config.json in a copy of its folder"
        )
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    merged = {**present, **scaling, "rope_type": kind}
    return config | {section: merged, "max_position_embeddings": _longest(config, merged, source)}


def _longest(config: Mapping[str, Any], scaling: Mapping[str, Any], source: str) -> int:
    """Return the positions to which the scaled RoPE extends the model. Raises ValueError."""
    present = config.get("max_position_embeddings", 2048)
    original = scaling.get("original_max_position_embeddings", present)
    factor = scaling.get("factor", 1.0)
    if not isinstance(factor, int | float) or not isinstance(original, int) or not isinstance(present, int):
        raise ValueError(f"model.rope_scaling={dict(scaling)}: factor and lengths of {source} must be numbers")
    if scaling["rope_type"] in _EXTENDS_ORIGINAL:
        return max(present, int(original * factor))
    return int(present * factor) if scaling["rope_type"] == "linear" else present
