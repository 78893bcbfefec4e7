"""Settings of image processors in the forms that checkpoints have: each makes the patches that transformers' class
makes, or the start is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aerie.speculative.build import EngineSpec, local_engine
from aerie.workers.config import ModelSource
from aerie.workers.prompt_inputs import PreparedImage
from aerie.workers.vision.config import PREPROCESSOR, PROCESSOR, vision_of
from aerie.workers.vision.processor import ImageJob, load_processor, prepared
from tests.support.targets.image_models import MAX_TOKENS, PATCH, file_of, make_image_model, picture
from tests.workers.vision.test_images_greedy import worker_of

SCALES: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255}
QWEN = SCALES | {"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2, "image_processor_type": "Q"}
EDGES, PIXELS = {"shortest_edge": 64, "longest_edge": 6400}, {"min_pixels": 64, "max_pixels": 6400}
TYPE = {"image_processor_type": "Qwen2VLImageProcessor"}
FAST = {"image_processor_type": "Qwen2VLImageProcessorFast"}
UNUSED = dict.fromkeys(("crop_size", "data_format", "device", "disable_grouping", "do_pad", "input_data_format"))
UNUSED |= dict.fromkeys(
    ("min_pixels", "max_pixels", "pad_size", "return_tensors", "do_center_crop", "default_to_square")
)
NO_TYPE = {name: value for name, value in QWEN.items() if name != "image_processor_type"}
# all limit an image to 6,400 pixels, though in other words
SERVED: dict[str, dict[str, Any]] = {
    "Qwen2-VL": {PREPROCESSOR: QWEN | PIXELS | TYPE | {"processor_class": "Qwen2VLProcessor"}},
    "Qwen2.5-VL": {PREPROCESSOR: QWEN | PIXELS | {"image_processor_type": "Qwen2_5_VLImageProcessor"}},
    "saved by 4.47": {PREPROCESSOR: QWEN | TYPE | {"size": PIXELS}},
    "saved by 4.49": {PREPROCESSOR: QWEN | TYPE | PIXELS | {"size": {"shortest_edge": 5, "longest_edge": 7}}},
    "saved by 4.57": {PREPROCESSOR: QWEN | FAST | UNUSED | {"size": EDGES}},
    "Qwen3-VL": {PREPROCESSOR: QWEN | FAST | {"size": EDGES}, "video_preprocessor_config.json": {"size": {}}},
    "Qwen3-VL by name": {PREPROCESSOR: QWEN | {"image_processor_type": "Qwen3VLImageProcessor", "size": EDGES}},
    "nested": {PROCESSOR: {"image_processor": QWEN | TYPE | {"size": EDGES}, "processor_class": "Qwen3VLProcessor"}},
    "nested first": {
        PROCESSOR: {"image_processor": QWEN | TYPE | {"size": EDGES}},
        PREPROCESSOR: QWEN | TYPE | {"size": {"shortest_edge": 64, "longest_edge": 1600}},
    },
    "not nested": {PROCESSOR: {"processor_class": "Qwen3VLProcessor"}, PREPROCESSOR: QWEN | FAST | {"size": EDGES}},
    "without a name": {PREPROCESSOR: NO_TYPE | {"size": EDGES, "processor_class": "Qwen3VLProcessor"}},
}


def write(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Replace a checkpoint's settings."""
    for name in (PREPROCESSOR, PROCESSOR):
        (folder / name).unlink(missing_ok=True)
    for name, settings in files.items():
        (folder / name).write_text(json.dumps(settings))


def image_of(folder: Path, image: Any) -> PreparedImage:
    vision = vision_of(ModelSource(path=str(folder)))
    assert vision is not None
    job = ImageJob(file_of(image), 1 << 24, vision.max_pixels, vision.placeholder, vision.patch_size)
    return prepared(job, load_processor(str(folder)))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    make_image_model(folder, "qwen3_5")
    return folder


@pytest.mark.parametrize("form", SERVED)
def test_limits_of_pixels_are_read_in_all_forms(qwen: Path, form: str) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    write(qwen, SERVED[form])
    own = Qwen2VLImageProcessorPil(size=dict(EDGES), patch_size=PATCH, merge_size=2)
    for i, sides in enumerate(((400, 300), (7, 9), (40, 48), (3, 200))):
        image = picture(i, *sides)
        raw = own(images=image, do_rescale=False, do_normalize=False, temporal_patch_size=1, return_tensors="np")
        found = image_of(qwen, image)
        assert not found.fault and found.grid == tuple(raw["image_grid_thw"][0])
        assert found.data == np.asarray(raw["pixel_values"]).astype(np.uint8).tobytes()


GEMMA3 = SCALES | {"image_processor_type": "Gemma3ImageProcessor", "image_seq_length": 256, "resample": 2}
GEMMA3 |= dict.fromkeys(("do_convert_rgb", "do_pan_and_scan", "pan_and_scan_max_num_crops"))
GEMMA3 |= {"do_normalize": True, "do_rescale": True, "do_resize": True, "size": {"height": 40, "width": 40}}
GEMMA4 = {"image_mean": [0.0] * 3, "image_std": [1.0] * 3, "rescale_factor": 1 / 255, "do_normalize": False}
GEMMA4 |= {"image_processor_type": "Gemma4ImageProcessor", "image_seq_length": 70, "max_soft_tokens": 70}
GEMMA4 |= {"patch_size": PATCH, "pooling_kernel_size": 3, "resample": 3}


@pytest.mark.parametrize(
    ("kind", "settings", "grid"),
    [
        ("gemma3", GEMMA3, (1, 10, 10)),
        ("gemma3", GEMMA3 | UNUSED | {"image_processor_type": "Gemma3ImageProcessorFast"}, (1, 10, 10)),
        ("gemma3", GEMMA3 | {"do_pan_and_scan": True}, (1, 10, 10)),
        ("gemma4", GEMMA4, (1, 21, 27)),
        ("gemma4", GEMMA4 | {"image_processor_type": "Gemma4ImageProcessorFast"}, (1, 21, 27)),
        ("gemma4", GEMMA4 | {"size": {"height": 224, "width": 224}}, (1, 21, 27)),  # of converters, without effect
        ("gemma4", GEMMA4 | {"max_soft_tokens": 140}, (1, 30, 39)),
        ("gemma4", {name: value for name, value in GEMMA4.items() if name != "max_soft_tokens"}, (1, 42, 57)),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_settings_of_gemma(tmp_path: Path, kind: str, settings: dict[str, Any], grid: Any, nested: bool) -> None:
    make_image_model(tmp_path, kind)
    write(tmp_path, {PROCESSOR: {"image_processor": settings}} if nested else {PREPROCESSOR: settings})
    found = image_of(tmp_path, picture(1, 400, 300))
    assert (found.fault, found.grid) == ("", grid)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("qwen3_5", QWEN | FAST | {"size": EDGES, "patch_size": 14}, "patch_size=14: the tower in config.json needs 4"),
        ("qwen3_5", QWEN | FAST | {"size": EDGES, "merge_size": 1}, "merge_size=1: the tower in config.json needs 2"),
        ("qwen3_5", QWEN | FAST | {"size": 640}, "needs shortest_edge and longest_edge"),
        ("qwen3_5", QWEN | FAST | {"do_resize": False}, "do_resize=False: the tower in config.json needs True"),
        ("qwen3_5", QWEN | {"image_processor_type": "Own"}, "image processor Own: supported are Qwen2VLImageProcessor"),
        ("gemma3", GEMMA3 | {"size": {"height": 44, "width": 40}}, r"size=\{'height': 44, 'width': 40\}: the tower in"),
        ("gemma3", {name: value for name, value in GEMMA3.items() if name != "size"}, "'height': 224, 'width': 224"),
        ("gemma4", GEMMA4 | {"patch_size": 16}, "patch_size=16: the tower in config.json needs 4"),
        ("gemma4", GEMMA4 | {"pooling_kernel_size": 2}, "pooling_kernel_size=2: the tower in config.json needs 3"),
        ("gemma4", GEMMA4 | {"max_soft_tokens": 100}, "its image processor cannot be loaded: .*max_soft_tokens"),
    ],
)
def test_settings_that_do_not_fit_the_tower_are_refused_by_the_start(
    tmp_path: Path, kind: str, settings: dict[str, Any], message: str
) -> None:
    """Their images would end a rank."""
    make_image_model(tmp_path, kind)
    write(tmp_path, {PREPROCESSOR: settings})
    step_tokens = 2 + MAX_TOKENS["gemma4"] * 4
    with (
        pytest.raises(ValueError, match=message) as refusal,
        local_engine(EngineSpec(worker_of(tmp_path, step_tokens=step_tokens))),
    ):
        pass
    assert "model.images=off" in str(refusal.value) or "cannot be loaded" in str(refusal.value)
