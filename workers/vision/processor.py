"""Decodes an image and prepares its patches with the checkpoint's own processor of transformers.

Bytes come from clients: the ingress runs `run_image` in processes that it may kill at any time. Ranks
read the processor's constants.
"""

import importlib
import io
import math
import resource
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from aerie.workers.models.config_fields import architecture_of
from aerie.workers.prompt_inputs import Placeholder, PreparedImage
from aerie.workers.structured_output.mask_messages import receive, send
from aerie.workers.structured_output.token_bytes import read_json
from aerie.workers.vision.config import CHANNELS, CONFIG, FAMILIES, PREPROCESSOR, Kind, VisionConfig, image_settings

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # of PIL; others, such as SVG and EPS, may run programs
_QWEN = ("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil")
# name in the settings, without `Fast` -> module of transformers, and its class
_PROCESSORS = {
    "Qwen2VLImageProcessor": _QWEN,
    "Qwen2_5_VLImageProcessor": _QWEN,
    "Qwen3VLImageProcessor": _QWEN,
    "Gemma3ImageProcessor": ("gemma3.image_processing_pil_gemma3", "Gemma3ImageProcessorPil"),
    "Gemma4ImageProcessor": ("gemma4.image_processing_pil_gemma4", "Gemma4ImageProcessorPil"),
}
# of settings without a name, as in transformers, which asks the model's class
_BY_KIND: Mapping[Kind, str] = {
    "qwen": "Qwen2VLImageProcessor",
    "gemma3": "Gemma3ImageProcessor",
    "gemma4": "Gemma4ImageProcessor",
}
_EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}  # former names of limits of pixels
Values = npt.NDArray[Any]
MAX_ASPECT = 200  # of the longer side to the shorter one, as in Qwen's processors


class ImageJob(msgspec.Struct, frozen=True, array_like=True):
    """An image to prepare.

    data: the file.
    max_source_pixels: limit of its own size.
    max_pixels: limit of its size after resizing.
    placeholder: see `PreparedImage`.
    patch_size: see `aerie.workers.vision.config.VisionConfig`.
    limit_s: limit of its CPU seconds, after which the system ends the process.
    """

    data: bytes
    max_source_pixels: int
    max_pixels: int
    placeholder: Placeholder
    patch_size: int
    limit_s: int = 60


class ImageError(ValueError):
    """The image cannot be used. The message says why."""


def load_processor(folder: str) -> Any:
    """Return the checkpoint's image processor, which computes with PIL and numpy: transformers' automatic class asks
    for torchvision. Raises ValueError."""
    settings = dict(image_settings(Path(folder)))
    named = str(settings.get("image_processor_type") or _name_by_family(folder)).removesuffix("Fast")
    if named not in _PROCESSORS:
        raise ValueError(
            f"{folder}: image processor {named or 'without a name'}: supported are {', '.join(_PROCESSORS)}; set "
            "model.images=off"
        )
    try:
        module, name = _PROCESSORS[named]
        kind = getattr(importlib.import_module(f"transformers.models.{module}"), name)
        if _PROCESSORS[named] == _QWEN:
            settings["size"] = _size_setting(settings, kind.size)
        return kind.from_dict(settings)
    except (ImportError, TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{folder}: its image processor cannot be loaded: {error}") from None


def _name_by_family(folder: str) -> str:
    family = FAMILIES.get(architecture_of(read_json(Path(folder) / CONFIG)))
    return "" if family is None else _BY_KIND[family.kind]


def _size_setting(settings: dict[str, Any], default: Mapping[str, int]) -> Any:
    """Return the value of the setting `size` of Qwen's processors, the minimum and maximum pixels of an image.

    Checkpoints write these limits in `size` or next to it, as min_pixels and max_pixels or as shortest_edge and
    longest_edge; those next to it are removed from `settings`. default: limits that the checkpoint does not set;
    copied, because transformers would change the class's default in place.
    """
    size = settings.get("size")
    if size is not None and not isinstance(size, dict):
        return size  # refused by `check_processor`
    found = dict(default)
    for given in (size or {}, {name: settings.pop(name, None) for name in _EDGES}):
        found |= {_EDGES.get(name, name): value for name, value in given.items() if value is not None}
    return found


def check_processor(processor: Any, config: VisionConfig, folder: str) -> None:
    """Raise ValueError if the images that a processor makes do not fit the tower. They would end a rank."""
    merge, side = config.merge_size, math.isqrt(config.max_pixels)
    wanted: dict[str, Any] = {"do_resize": True}
    if config.family.kind == "gemma3":
        wanted["size"] = {"height": side, "width": side}
    else:
        wanted |= {"patch_size": config.patch_size, "merge_size" if config.has_mrope else "pooling_kernel_size": merge}
    for name, value in wanted.items():
        if (found := _plain(getattr(processor, name))) != value:
            raise ValueError(
                f"{folder}: {PREPROCESSOR}: {name}={found}: the tower in config.json needs {value}; correct it, or set "
                "model.images=off"
            )
    if config.has_mrope and not all(_plain(processor.size).get(edge) for edge in _EDGES.values()):
        raise ValueError(
            f"{folder}: {PREPROCESSOR}: size={_plain(processor.size)}: needs shortest_edge and longest_edge; correct "
            "it, or set model.images=off"
        )


def _plain(value: Any) -> Any:
    """Return a setting as JSON has it. Sizes are transformers' `SizeDict`s."""
    return value if isinstance(value, bool | int) else {name: each for name, each in dict(value).items() if each}


def run_image(files: list[int], processor: Any) -> None:
    """Prepare one image. files: descriptor of the socket that receives the job and sends the result."""
    own = socket.socket(fileno=files[0])
    job = receive(own, ImageJob)
    if job is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (job.limit_s, job.limit_s))
        send(own, prepared(job, processor))


def prepared(job: ImageJob, processor: Any) -> PreparedImage:
    """Return the patches of an image, or why it cannot be used."""
    try:
        return _prepared(job, processor)
    except ImageError as error:
        return PreparedImage(fault=str(error))
    except MemoryError:
        return PreparedImage(fault="it takes too much memory to decode")
    except Exception as error:  # decoders raise errors of many classes on damaged files
        return PreparedImage(fault=f"it cannot be decoded: {str(error)[:200] or type(error).__name__}")


def _prepared(job: ImageJob, processor: Any) -> PreparedImage:
    """Decode an image and cut it into patches of bytes."""
    image = decoded(job)
    prepare = {"Gemma3ImageProcessorPil": _gemma3, "Gemma4ImageProcessorPil": _gemma4}.get(
        type(processor).__name__, _qwen
    )
    patches, (rows, columns) = prepare(image, job, processor)
    values = patches.astype(np.uint8)
    assert (values == patches).all(), "pixels that are neither scaled nor normalised are bytes"
    num_rows = rows * columns // job.placeholder.merge_size**2
    return PreparedImage((1, rows, columns), values.tobytes(), job.placeholder, num_rows)


_RAW = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}


def _qwen(image: Any, job: ImageJob, processor: Any) -> tuple[Values, tuple[int, int]]:
    """Return [patches, channels, pixels], and rows and columns of patches."""
    sizes = processor.size
    smallest, largest = (min(sizes[key], job.max_pixels) for key in ("shortest_edge", "longest_edge"))
    # one frame, because an image's frames are equal
    output = processor(images=image, min_pixels=smallest, max_pixels=largest, temporal_patch_size=1, **_RAW)
    patches = np.asarray(output["pixel_values"])
    _, rows, columns = output["image_grid_thw"][0].tolist()
    return patches.reshape(len(patches), CHANNELS, -1), (rows, columns)


def _gemma3(image: Any, job: ImageJob, processor: Any) -> tuple[Values, tuple[int, int]]:
    """As `_qwen`. The picture is not cropped into several."""
    pixels = np.asarray(processor(images=image, do_pan_and_scan=False, **_RAW)["pixel_values"][0])
    side = math.isqrt(job.max_pixels)
    if pixels.shape != (CHANNELS, side, side):
        raise ImageError(f"the checkpoint's image processor makes {pixels.shape}, its tower has {side} x {side} pixels")
    return _patches(pixels, job.patch_size)


def _gemma4(image: Any, job: ImageJob, processor: Any) -> tuple[Values, tuple[int, int]]:
    """As `_qwen`."""
    output = processor(images=image, **_RAW)
    columns, rows = (int(size) + 1 for size in np.asarray(output["image_position_ids"][0]).max(0))
    patches = np.asarray(output["pixel_values"][0])[: rows * columns]  # without padding
    return patches.reshape(len(patches), -1, CHANNELS).transpose(0, 2, 1), (rows, columns)


def _patches(pixels: Values, size: int) -> tuple[Values, tuple[int, int]]:
    """Return the patches of pixels [channels, height, width], and their rows and columns."""
    rows, columns = pixels.shape[1] // size, pixels.shape[2] // size
    cut = pixels.reshape(CHANNELS, rows, size, columns, size).transpose(1, 3, 0, 2, 4)
    return cut.reshape(rows * columns, CHANNELS, -1), (rows, columns)


def decoded(job: ImageJob) -> Any:
    """Return an RGB image, upright. Raises ImageError before a large image is decoded."""
    from PIL import Image, ImageFile, ImageOps

    ImageFile.LOAD_TRUNCATED_IMAGES = False
    Image.MAX_IMAGE_PIXELS = None  # checked below, with a limit of our own
    try:
        image = Image.open(io.BytesIO(job.data), formats=FORMATS)
    except Exception:
        raise ImageError(f"it is not a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file, or it is damaged") from None
    width, height = image.size
    if width * height > job.max_source_pixels:
        raise ImageError(f"{width} x {height} pixels are more than {job.max_source_pixels}; send a smaller image")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise ImageError(f"{width} x {height} pixels: one side may be at most {MAX_ASPECT} times the other")
    return _on_white(ImageOps.exif_transpose(image))


def _on_white(image: Any) -> Any:
    """Return the image, or its first frame, in RGB; transparent parts are white."""
    from PIL import Image

    if image.mode.startswith("I"):  # up to 16 bits a pixel, which PIL would clip to 8 (13.0, `convert`)
        image = Image.fromarray((np.asarray(image, np.uint32).clip(0, 65535) >> 8).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        whole = image.convert("RGBA")
        white = Image.new("RGBA", whole.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, whole).convert("RGB")
    return image.convert("RGB")
