"""Decodes an image and prepares its patches with the checkpoint's own processor of transformers.

Bytes come from clients: the ingress runs `run_image` in processes that it may kill at any time. Ranks
read the processor's constants.
"""

import importlib
import io
import resource
import socket
from pathlib import Path
from typing import Any

import msgspec

from aerie.workers.prompt_inputs import PreparedImage
from aerie.workers.structured_output.framing import receive, send
from aerie.workers.structured_output.tokenizer_file import read_json
from aerie.workers.vision.config import CHANNELS, PREPROCESSOR, PROCESSOR

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # of PIL; others, such as SVG and EPS, may run programs
_QWEN = ("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil")
# name in the settings, without `Fast` -> module of transformers, and its class
_PROCESSORS = {"Qwen2VLImageProcessor": _QWEN, "Qwen2_5_VLImageProcessor": _QWEN, "Qwen3VLImageProcessor": _QWEN}
MAX_ASPECT = 200  # of the longer side to the shorter one, as in Qwen's processors


class ImageJob(msgspec.Struct, frozen=True, array_like=True):
    """An image to prepare.

    data: the file.
    max_source_pixels: limit of its own size.
    max_pixels: limit of its size after resizing.
    token_id, merge_size: see `PreparedImage`.
    limit_s: limit of its CPU seconds, after which the system ends the process.
    """

    data: bytes
    max_source_pixels: int
    max_pixels: int
    token_id: int
    merge_size: int
    limit_s: int = 60


class ImageError(ValueError):
    """The image cannot be used. The message says why."""


def load_processor(folder: str) -> Any:
    """Return the checkpoint's image processor, which computes with PIL and numpy: transformers' automatic class asks
    for torchvision. Raises ValueError."""
    settings = read_json(Path(folder) / PREPROCESSOR) or read_json(Path(folder) / PROCESSOR).get("image_processor", {})
    named = str(settings.get("image_processor_type", "")).removesuffix("Fast")
    if named not in _PROCESSORS:
        raise ValueError(
            f"{folder}: image processor {named or 'without a name'}: supported are {', '.join(_PROCESSORS)}"
        )
    try:
        module, name = _PROCESSORS[named]
        return getattr(importlib.import_module(f"transformers.models.{module}"), name).from_dict(settings)
    except (ImportError, TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{folder}: its image processor cannot be loaded: {error}") from None


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
    import numpy as np

    image = _decoded(job)
    sizes = processor.size
    smallest = min(sizes["shortest_edge"], job.max_pixels)
    largest = min(sizes["longest_edge"], job.max_pixels)
    found = processor(
        images=image,
        do_rescale=False,
        do_normalize=False,
        min_pixels=smallest,
        max_pixels=largest,
        return_tensors="np",
    )
    patches = np.asarray(found["pixel_values"])
    values = patches.astype(np.uint8)
    assert (values == patches).all(), "pixels that are neither scaled nor normalised are bytes"
    _, rows, columns = found["image_grid_thw"][0].tolist()
    # [patches, channels, frames, pixels]: an image's frames are equal
    frames = values.reshape(len(values), CHANNELS, processor.temporal_patch_size, -1)
    values = np.ascontiguousarray(frames[:, :, 0])
    num_rows = rows * columns // job.merge_size**2
    return PreparedImage((1, rows, columns), values.tobytes(), job.token_id, num_rows, job.merge_size)


def _decoded(job: ImageJob) -> Any:
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

    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        whole = image.convert("RGBA")
        white = Image.new("RGBA", whole.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, whole).convert("RGB")
    return image.convert("RGB")
