"""Frequencies of RoPE against transformers' function for the same settings."""

import math

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from aerie.workers.layers.rotary import RopeConfig, frequencies

HEAD_DIM, LENGTH = 64, 8192


def both(low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return our frequencies and transformers', for Llama 3's scaling by 8."""
    settings = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": LENGTH}
    settings |= {"low_freq_factor": low, "high_freq_factor": high}
    config = LlamaConfig(head_dim=HEAD_DIM, max_position_embeddings=4 * LENGTH, rope_parameters=settings)
    ours = frequencies(RopeConfig(10000.0, "llama3", 8.0, low, high, LENGTH), HEAD_DIM)
    return ours, ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]


@pytest.mark.parametrize("low,high", [(1.0, 4.0), (1.0, 1.0), (4.0, 1.0)], ids=["blended", "equal", "reversed"])
def test_llama3_frequencies_are_those_of_transformers(low: float, high: float) -> None:
    """Llama 4 Scout has equal factors. Where they are reversed, transformers warns and blends nothing."""
    ours, theirs = both(low, high)
    torch.testing.assert_close(ours, theirs)


def test_equal_factors_give_numbers_where_a_wavelength_is_the_limit() -> None:
    """The fastest dimension makes exactly `low_freq_factor` turns in the original length."""
    turns = float(LENGTH / torch.tensor(2 * math.pi))
    ours, theirs = both(turns, turns)
    assert ours[0] == 1.0, "not divided: its wavelength is not longer than the limit"
    torch.testing.assert_close(ours[1:], theirs[1:])  # transformers divides 0 by 0 for the first
