"""Checkpoints of the adapter's models that have other names or more tensors than transformers' class, as published ones
do."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.known_models import make_known
from tests.support.slow import slow
from tests.workers.models.test_targets import by_transformers, by_us


def changed(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    path = str(folder / "model.safetensors")
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    return folder


def with_more(*names: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: tensors | {name: torch.ones(3) for name in names}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("gpt_neox", ("gpt_neox.layers.1.attention.bias", "gpt_neox.layers.1.attention.masked_bias")),  # Pythia
        *slow(
            ("exaone_moe", ("mtp.layers.0.mlp.down_proj.weight",)),
            ("mimo_v2_flash", ("model.mtp.layers.0.mlp.down_proj.weight",)),
            ("gpt2", ("transformer.h.0.attn.bias",)),
        ),
    ],
)
def test_tensors_that_transformers_ignores_are_not_loaded(tmp_path: Path, kind: str, more: tuple[str, ...]) -> None:
    target = make_known(tmp_path, kind, num_hidden_layers=2)
    expected = by_transformers(target)
    changed(target, with_more(*more))
    assert by_us(target) == expected


def test_modules_for_drafting_are_not_loaded_with_the_decoder(tmp_path: Path) -> None:
    """As many as config.json says; another layer does not belong to the model."""
    target = make_known(tmp_path, "dots1", num_hidden_layers=2, num_nextn_predict_layers=1)
    expected = by_transformers(target)
    changed(target, with_more("model.layers.2.eh_proj.weight"))
    assert by_us(target) == expected
    changed(target, with_more("model.layers.3.eh_proj.weight"))
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.3\.eh_proj\.weight"):
        by_us(target)


def test_names_of_a_base_model_are_known(tmp_path: Path) -> None:
    """GPT-2 is published so. Its `attn.bias` is a mask; `c_attn.bias`, in which the name occurs, is loaded."""
    target = make_known(tmp_path, "gpt2")
    expected = by_transformers(target)
    changed(target, lambda tensors: {name.removeprefix("transformer."): each for name, each in tensors.items()})
    changed(target, with_more("h.0.attn.bias"))
    assert by_us(target) == expected
