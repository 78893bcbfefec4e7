"""Towers that attend to all windows in one launch, and passes of a few sizes: the same embeddings as with transformers'
own attention."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.attention import varlen

from aerie.kernels.operation import OPERATIONS, Operation
from aerie.workers.config import ModelSource
from aerie.workers.vision import encoders
from aerie.workers.vision.captured import CapturedForward, Recording
from aerie.workers.vision.config import vision_of
from aerie.workers.vision.encoders import Grid, QwenEncoder, build_encoder
from tests.support.targets.image_models import make_image_model

GRIDS = [(1, 2, 2), (1, 6, 4), (1, 10, 8)]  # with windows of 4 patches a side, some of them smaller


def _reference(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, _: Tensor, longest: int, __: int) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn`, which has no CPU form. q, k, v: [rows, heads, dim]."""
    ends = bounds.tolist()
    assert longest >= max(end - start for start, end in zip(ends, ends[1:], strict=False)) and ends[-1] == len(q)
    parts = []
    for start, end in zip(ends, ends[1:], strict=False):
        q_part, k_part, v_part = (x[start:end].transpose(0, 1) for x in (q, k, v))
        weights = (q_part @ k_part.transpose(1, 2) * q.shape[2] ** -0.5).softmax(2)
        parts.append((weights @ v_part).transpose(0, 1))
    return torch.cat(parts)


KINDS = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"]


@dataclass
class Case:
    """expected: what transformers' own attention gives. launches: one entry for each launch of the other one."""

    encoder: QwenEncoder
    pixels: list[Tensor]
    expected: list[Tensor]
    launches: list[int]

    @property
    def patch_pixels(self) -> int:
        return self.pixels[0].shape[2]


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    make_image_model(tmp_path, request.param)
    config = vision_of(ModelSource(path=str(tmp_path)))
    assert config is not None
    torch.manual_seed(0)
    encoder = build_encoder(config).eval()
    assert isinstance(encoder, QwenEncoder)
    pixels = [torch.randn(h * w, 3, config.patch_size**2) for _, h, w in GRIDS]
    launches: list[int] = []

    def attend(*arguments: Tensor) -> Tensor:
        launches.append(1)
        return _reference(*arguments)  # type: ignore[arg-type]

    with torch.inference_mode():
        expected = [encoder(x, grid) for x, grid in zip(pixels, GRIDS, strict=True)]
        monkeypatch.setattr(varlen, "varlen_attn", attend)
        encoder.fuse(in_one_launch=True)
        yield Case(encoder, pixels, expected, launches)


def test_embeddings_are_those_of_transformers(case: Case) -> None:
    for x, grid, wanted in zip(case.pixels, GRIDS, case.expected, strict=True):
        torch.testing.assert_close(case.encoder(x, grid), wanted, rtol=1e-5, atol=1e-5)
    assert len(case.launches) == len(GRIDS) * len(case.encoder.blocks)


def _stand_in(forward: Callable[[], Tensor], blocks: Iterable[nn.Module]) -> Recording:
    """As graphs are: memory of the inputs and of the result is that of the recording; a part for each block and one
    before. All is computed in the last part."""
    result = forward().clone()
    result.fill_(torch.nan)

    def last() -> None:
        result.copy_(forward())

    return [*([lambda: None] * len(list(blocks))), last], result


def test_passes_of_a_few_sizes_have_the_same_embeddings(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images smaller than a size and as large as one; while a pass is paused others run, and one is abandoned."""
    monkeypatch.setattr(encoders, "SIZES", (24, 40, 80, 96))
    encoder = case.encoder
    passes = CapturedForward(encoder, 80, case.patch_pixels, torch.device("cpu"), _stand_in)
    images = [(x, grid, len(x) // 4) for x, grid in zip(case.pixels, GRIDS, strict=True)]
    assert passes.covers(80) and not passes.covers(81)

    def close(rows: Tensor | None, i: int) -> None:
        torch.testing.assert_close(rows, case.expected[i], rtol=1e-5, atol=1e-5)

    for i, image in enumerate(images):
        close(passes.run(*image), i)
    for i, j in itertools.permutations(range(3), 2):
        passes.start(*images[i])
        assert passes.advance(1) is None
        close(passes.run(*images[j]), j)
        close(passes.advance(len(encoder.blocks) - 1), i)
    passes.start(*images[0])
    passes.start(*images[2])
    close(passes.advance(0), 2)
    passes.start(*images[1])
    passes.abandon()
    close(passes.run(*images[0]), 0)


def test_a_thin_image_has_as_many_windows_as_the_layout_holds(case: Case) -> None:
    for grid in ((1, 2, 40), (1, 40, 2), (1, 6, 12), (1, 2, 38), (1, 38, 2), (1, 2, 2)):
        layout = case.encoder.padded(grid, 80)
        assert layout is not None
        whole = case.encoder.padded((1, 10, 8), 80)
        assert whole is not None and {k: v.shape for k, v in layout.items()} == {k: v.shape for k, v in whole.items()}
        assert all(int(v[-1]) == 80 and bool((v.diff() >= 0).all()) for k, v in layout.items() if k.startswith("cu_"))


@pytest.mark.parametrize(
    ("kind", "grids"), [("gemma3", [(1, 10, 10)]), ("gemma4", [(1, 21, 27), (1, 9, 63), (1, 30, 21), (1, 3, 3)])]
)
def test_passes_of_one_size_have_the_same_embeddings(tmp_path: Path, kind: str, grids: list[Grid]) -> None:
    """Gemma 3's without padding, and Gemma 4's, whose pictures have nearly the same size."""
    make_image_model(tmp_path, kind)
    config = vision_of(ModelSource(path=str(tmp_path)))
    assert config is not None
    encoder, patch_pixels = build_encoder(config).eval(), config.patch_size**2
    torch.manual_seed(1)
    for name, tensor in (*encoder.named_parameters(), *encoder.named_buffers()):
        if name.endswith(("std_bias", "std_scale", "position_embedding_table", "mm_input_projection_weight")):
            torch.nn.init.normal_(tensor, 1.0, 0.5)
    merged = config.merge_size**2
    pixels = [torch.rand(rows * columns, 3, patch_pixels) for _, rows, columns in grids]
    with torch.inference_mode():
        passes = CapturedForward(encoder, config.max_patches, patch_pixels, torch.device("cpu"), _stand_in)
        assert passes.covers(config.max_patches)
        for x, grid in zip(pixels, grids, strict=True):
            expected = encoder(x, grid)
            assert len(expected) == len(x) // merged and expected.std() > 0.01
            passes.start(x, grid, len(expected))
            assert passes.advance(1) is None
            torch.testing.assert_close(passes.advance(0), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [*KINDS, "gemma3", "gemma4"])
def test_captured_passes_ask_the_device_for_no_value(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA graph cannot contain such a question. Here it is an error, because the tensors have no values.

    References replace the kernels for CPUs, which read memory."""
    monkeypatch.setattr(Operation, "serving", lambda *_: ())
    for each in OPERATIONS:
        monkeypatch.setattr(each, "_by_device", {})
    make_image_model(tmp_path, kind)
    config = vision_of(ModelSource(path=str(tmp_path)))
    assert config is not None
    encoder = build_encoder(config).eval()
    if isinstance(encoder, QwenEncoder):
        encoder.fuse(in_one_launch=True)
    size = encoder.captured_sizes(config.max_patches)[-1] if kind.startswith("gemma") else 96
    layout = encoder.padded((1, 2 * encoder.merge_size, 2 * encoder.merge_size), size)
    assert layout is not None
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.inference_mode():
        inputs = {name: mode.from_tensor(tensor) for name, tensor in layout.items()}
        out = encoder.forward_padded(torch.zeros(size, 3, config.patch_size**2), inputs)
        with pytest.raises(DataDependentOutputException):
            bool(out.any())
    assert out.shape[1] == config.row_values
