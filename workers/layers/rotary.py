"""Rotary position embedding (arXiv 2104.09864), in the half-split layout of Hugging Face checkpoints."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions. kind "llama3" rescales long wavelengths (Llama 3.1 model card); "linear" divides by factor."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class Angles:
    """cos and sin of the rows of a pass: row i's are cos[index[i]], [head_dim / 2] float32; index: [rows] int64."""

    cos: Tensor
    sin: Tensor
    index: Tensor


class RotaryTable:
    """cos and sin for all positions: [max_position, head_dim / 2] float32 on `device`, whatever device context it is
    made in (models are made on the meta device first)."""

    def __init__(self, rope: RopeConfig, head_dim: int, max_position: int, device: torch.device) -> None:
        frequencies = _frequencies(rope, head_dim)
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32, device="cpu"), frequencies)
        self._cos = angles.cos().to(device)
        self._sin = angles.sin().to(device)

    def at(self, positions: Tensor) -> Angles:
        """The angles at positions [rows] int64, which are looked up where rows are turned (`KVLayout.store`)."""
        return Angles(self._cos, self._sin, positions)


def _frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] float32 radians per position."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Wavelengths beyond original_max_position / low_freq_factor are slowed by `factor`, those below
    original_max_position / high_freq_factor kept, the ones between blended (Llama 3.1 reference code)."""
    wavelength = 2 * math.pi / frequencies
    blend = rope.original_max_position / wavelength - rope.low_freq_factor
    blend = (blend / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies
