"""Models of all families loaded again in place: they hold what a model loaded from the new checkpoint holds, at the
addresses that they had."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from aerie.kernels.fp8.tiles import Fp8Matrix
from aerie.kernels.span import Span
from aerie.workers.config import ModelSource
from aerie.workers.distributed.tp_group import SOLO, TPGroup
from aerie.workers.layers.linear_method import DenseLinearMethod, LinearShape, Part
from aerie.workers.layers.vocab import VocabEmbedding
from aerie.workers.models.loading import allocate_target, load_target, read_target_config, weight_names
from aerie.workers.models.weights import CheckpointTensor, checkpoint_tensors
from aerie.workers.quantization.fp8_linear import Fp8Linear
from aerie.workers.quantization.fp8_weight import Fp8Scheme
from aerie.workers.runner.weight_update import META, RunningModel
from tests.support.int_checkpoints import awq, quantise
from tests.support.tiny_models import FAMILY_SETTINGS, make_target
from tests.workers.layers.test_block_fp8 import quantised

CPU = torch.device("cpu")
QUICK = ("DeepseekV3", "Gemma3", "GptOss", "Qwen3Next")
OTHERS = ("Llama", "OPT", "Cohere", *FAMILY_SETTINGS)


def running(folder: Path, group: TPGroup) -> RunningModel:
    source = ModelSource(path=str(folder), device="cpu")
    config = read_target_config(source, group.size)
    model = load_target(source, config, group, CPU, 64)
    names = weight_names(config, "model x")
    return RunningModel(
        "model x", model, names, lambda: allocate_target(config, group, META, 64, (), torch.float32, "model x")
    )


def tensors_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """All weights and buffers, whoever has them."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for path, module in model.named_modules():
        if isinstance(module, DenseLinearMethod):
            found[f"{path}.dense"] = module.dense_weight()
        elif isinstance(module, VocabEmbedding):
            found[f"{path}.dense"] = module.dense_weight
    return found


@pytest.mark.parametrize(
    ("family", "on_host"),
    [
        *((name, False) for name in QUICK),
        ("Gemma3", True),
        ("DeepseekV3", True),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in OTHERS if name not in QUICK),
    ],
)
def test_a_model_loaded_again_is_the_new_one_at_its_old_addresses(
    family: str, on_host: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """on_host: with the products for CPUs, which have weights in their own layout and move them."""
    if not on_host:
        monkeypatch.setattr("aerie.kernels.gemm.workspace.compiles", lambda here: False)
    group = SOLO if family == "OPT" else TPGroup(1, 2)  # the second of two ranks; nothing is exchanged
    first, second = (make_target(tmp_path / str(seed), seed=seed, architecture=family) for seed in (0, 1))
    old, new = running(first, group), running(second, group)
    addresses = {name: each.data_ptr() for name, each in tensors_of(old.model).items()}
    assert any(not torch.equal(each, tensors_of(new.model)[name]) for name, each in tensors_of(old.model).items())
    read = partial(checkpoint_tensors, second)
    assert old.check(read) == ()
    old.load(read)
    wanted = tensors_of(new.model)
    for name, each in tensors_of(old.model).items():
        assert torch.equal(each, wanted[name]), name
        assert on_host or each.data_ptr() == addresses[name], name


def test_converted_weights_are_refused_by_name_and_the_others_are_not(tmp_path: Path) -> None:
    folder = quantise(make_target(tmp_path / "plain"), tmp_path / "awq", awq())
    model = running(folder, SOLO)
    with pytest.raises(ValueError, match=r"_proj.*is stored as .*(AWQ|4-bit|int)"):
        model.check(partial(checkpoint_tensors, folder))

    def norms(device: torch.device) -> list[CheckpointTensor]:
        return [each for each in checkpoint_tensors(folder, device) if "norm" in each.name]

    assert model.check(norms)
    model.load(norms)


@pytest.mark.parametrize("on_host", [False, True])
def test_fp8_weights_are_loaded_again_and_those_not_sent_keep_their_values(
    on_host: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPUs dequantise them; half of a checkpoint at a time."""
    if not on_host:
        monkeypatch.setattr("aerie.kernels.gemm.workspace.compiles", lambda here: False)
    first, second = (
        quantised(make_target(tmp_path / f"plain{seed}", seed=seed), tmp_path / str(seed)) for seed in (0, 1)
    )
    old, new = running(first, SOLO), running(second, SOLO)
    names = sorted(each.name for each in checkpoint_tensors(second))
    for some in (names[::2], names[1::2]):

        def half(device: torch.device, some: list[str] = some) -> list[CheckpointTensor]:
            return [each for each in checkpoint_tensors(second, device) if each.name in some]

        assert len(old.check(half)) == len(names) - len(some)
        old.load(half)
    wanted = tensors_of(new.model)
    for name, each in tensors_of(old.model).items():
        assert torch.equal(each, wanted[name]), name


def test_fp8_weights_that_stay_in_fp8_are_loaded_into_the_memory_that_kernels_read(tmp_path: Path) -> None:
    """As on a GPU: the product has the weight itself, and scales in its own layout."""
    parts = (Part("a", Span.whole(128), Span.whole(256), 0), Part("b", Span.whole(64), Span.whole(256), 128))
    scheme = Fp8Scheme("weight_scale_inv", (128, 128))
    generator = torch.Generator().manual_seed(4)
    methods = [Fp8Linear(LinearShape(parts), scheme) for _ in range(2)]
    methods[1].fill_dummy(generator)
    for scale in methods[1].scales:
        scale.data.uniform_(0.1, 2.0, generator=generator)
    old, new = methods
    old.fill_dummy(generator)
    old._matrix = Fp8Matrix(*old.weight_and_scales())
    addresses = old._matrix.values.data_ptr(), old._matrix.scales.data_ptr()
    assert new.weight is not None
    old.reopen()
    for index, part in enumerate(parts):
        old.load("weight", part, new.weight.data[part.offset : part.offset + part.rows.size])
        old.load("weight_scale_inv", part, new.scales[index].data)
    old.reloaded()
    values, scales = new.weight_and_scales()
    assert torch.equal(old._matrix.values.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(old._matrix.scales, scales)
    assert (old._matrix.values.data_ptr(), old._matrix.scales.data_ptr()) == addresses
