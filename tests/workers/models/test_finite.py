"""NaN and infinite weights end a load with the file and the tensor; finite ones of every type pass. What
stood in the memory before plays no part."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aerie.workers.config import ModelSource
from aerie.workers.distributed.tp_group import SOLO, TPGroup
from aerie.workers.models.decoder import TargetModel
from aerie.workers.models.loading import _is_finite, _memory_for, load_target, read_target_config
from tests.support.tiny_models import FAMILY_SETTINGS, VOCAB, make_target

CPU = torch.device("cpu")


def load(folder: Path, group: TPGroup = SOLO, dtype: str = "auto") -> TargetModel:
    source = ModelSource(path=str(folder), dtype=dtype)  # type: ignore[arg-type]
    return load_target(source, read_target_config(source, group.size), group, CPU, 16)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.0.self_attn.v_proj.weight", "model.norm.weight"]
)
def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, name: str, value: float) -> None:
    folder = make_target(tmp_path, num_hidden_layers=1)
    tensors = load_file(str(folder / "model.safetensors"))
    tensors[name].view(-1)[-1] = value
    save_file(tensors, str(folder / "model.safetensors"))
    expected = rf"model {folder}: weights are NaN or infinite: {name} \(model.safetensors\); download"
    with pytest.raises(ValueError, match=expected):
        load(folder)
    if name.endswith("v_proj.weight"):  # the last number is the second rank's
        load(folder, TPGroup(0, 2))
        with pytest.raises(ValueError, match=expected):
            load(folder, TPGroup(1, 2))


def test_weights_that_overflow_the_type_are_told_from_damaged_ones(tmp_path: Path) -> None:
    folder = make_target(tmp_path, num_hidden_layers=1)
    tensors = load_file(str(folder / "model.safetensors"))
    tensors["model.norm.weight"][0] = 1e6
    save_file(tensors, str(folder / "model.safetensors"))
    load(folder)
    with pytest.raises(ValueError, match=r"weights of norm overflow torch.float16; set dtype: bfloat16"):
        load(folder, dtype="float16")


def _nan_memory(planned: Tensor, device: torch.device) -> Tensor:
    """Memory as a device may give it: the worst that can stand there."""
    memory = _memory_for(planned, device)
    return memory.fill_(float("nan") if memory.is_floating_point() else -1)


@pytest.mark.parametrize("architecture", ["Llama", *FAMILY_SETTINGS])
def test_a_load_fills_every_weight_and_checks_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    folder = make_target(tmp_path, architecture=architecture, vocab_size=VOCAB + (architecture != "Gemma4"))
    monkeypatch.setattr("aerie.workers.models.loading._memory_for", _nan_memory)
    for group in (SOLO, TPGroup(1, 2)):
        model = load(folder, group)
        assert [name for name, weight in model.named_parameters() if weight.isnan().any()] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_every_number_of_a_type_is_told_apart(dtype: torch.dtype) -> None:
    whole = torch.int8 if dtype.itemsize == 1 else torch.int16
    bits = torch.arange(torch.iinfo(whole).min, torch.iinfo(whole).max + 1, dtype=whole)
    numbers = bits.view(dtype) if dtype.itemsize < 4 else (bits.int() << 16).view(dtype)
    finite = torch.isfinite(numbers.float())
    assert _is_finite(numbers[finite])
    wrong = numbers[~finite]  # infinities and NaNs of either sign, NaNs with every bit set or one
    some = torch.cat((wrong[:2], wrong[-2:], wrong[:: 1 + len(wrong) // 50]))
    assert not any(_is_finite(torch.cat((numbers[finite][:3], each.view(1)))) for each in some)


def test_a_load_tells_how_far_it_is(tmp_path: Path) -> None:
    folder = make_target(tmp_path, num_hidden_layers=1)
    heard: list[tuple[int, int]] = []
    source = ModelSource(path=str(folder))
    config = read_target_config(source, 1)
    load_target(source, config, SOLO, CPU, 16, advance=lambda *far: heard.append(far))
    done, (total, *others) = [each for each, _ in heard], sorted({each for _, each in heard})
    assert done == sorted(done) and not others and len(done) == len(load_file(str(folder / "model.safetensors")))
    header = total - done[-1]
    assert total == (folder / "model.safetensors").stat().st_size and 0 < header < 20_000
