"""`VisionConfig`: what of a checkpoint concerns images, and the table of families whose images are served. Imports no
torch, because the ingress reads it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from aerie.workers.config import ModelSource
from aerie.workers.models.config_fields import architecture_of, section_of, size_of
from aerie.workers.models.gguf.location import INDEX
from aerie.workers.prompt_inputs import Placeholder
from aerie.workers.structured_output.token_bytes import read_json

CONFIG = "config.json"
PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"  # may contain the image processor's settings
CHANNELS = 3  # red, green and blue


Kind = Literal["qwen", "gemma3", "gemma4"]


@dataclass(frozen=True)
class VisionFamily:
    """Classes of transformers for the tower of an architecture.

    kind: names its reader (`_READERS`) and its encoder (`aerie.workers.vision.encoders.ENCODERS`).
    package: name of the package in `transformers.models`.
    tower, config: the tower's class and its configuration's.
    model_package: package of the whole model, if that is another one.
    text, replacement: see `Placeholder`.
    """

    kind: Kind
    package: str
    tower: str
    config: str
    model_package: str = ""
    text: str = ""
    replacement: str = ""


_QWEN3_VL = VisionFamily("qwen", "qwen3_vl", "Qwen3VLVisionModel", "Qwen3VLVisionConfig")
_QWEN3_5 = VisionFamily("qwen", "qwen3_5", "Qwen3_5VisionModel", "Qwen3_5VisionConfig")
FAMILIES = {
    "Qwen2VLForConditionalGeneration": VisionFamily(
        "qwen", "qwen2_vl", "Qwen2VisionTransformerPretrainedModel", "Qwen2VLVisionConfig"
    ),
    "Qwen2_5_VLForConditionalGeneration": VisionFamily(
        "qwen", "qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", "Qwen2_5_VLVisionConfig"
    ),
    "Qwen3VLForConditionalGeneration": _QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": VisionFamily(
        "qwen", "qwen3_vl_moe", "Qwen3VLMoeVisionModel", "Qwen3VLMoeVisionConfig"
    ),
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": VisionFamily(
        "qwen", "qwen3_5_moe", "Qwen3_5MoeVisionModel", "Qwen3_5MoeVisionConfig"
    ),
    "Gemma3ForConditionalGeneration": VisionFamily(
        "gemma3",
        "siglip",
        "SiglipVisionModel",
        "SiglipVisionConfig",
        "gemma3",
        "<start_of_image>",
        "\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
    ),
    "Gemma4ForConditionalGeneration": VisionFamily(
        "gemma4",
        "gemma4",
        "Gemma4VisionModel",
        "Gemma4VisionConfig",
        "gemma4",
        "<|image|>",
        "<|image><|image|><image|>",
    ),
}


@dataclass(frozen=True)
class VisionConfig:
    """A checkpoint's images.

    family: the tower's classes.
    tower: its configuration, as in config.json.
    image_token_id, filler_id: see `Placeholder`.
    patch_size, frames: pixels of a patch: frames x patch_size x patch_size.
    merge_size: rows, and columns, of the patches that make a token.
    hidden_size: size of the embeddings.
    num_deep: layers of the decoder before which the tower's inner features are added (DeepStack, arXiv 2406.04334).
    max_pixels: maximum pixels of a resized image.
    whole: see `ImageSizes`.
    fixed: whether all images have `max_pixels`.
    has_mrope: whether tokens have M-RoPE positions.
    """

    family: VisionFamily
    tower: Mapping[str, Any]
    image_token_id: int
    filler_id: int
    patch_size: int
    frames: int
    merge_size: int
    hidden_size: int
    num_deep: int
    max_pixels: int
    whole: bool
    has_mrope: bool
    fixed: bool = False

    @property
    def placeholder(self) -> Placeholder:
        family = self.family
        token, filler, merged = self.image_token_id, self.filler_id, self.merge_size
        return Placeholder(family.text, family.replacement, token, filler, merged, self.has_mrope)

    @property
    def patch_bytes(self) -> int:
        """Bytes of a patch in `aerie.workers.prompt_inputs.Image`, which has one frame."""
        return CHANNELS * self.patch_size**2

    @property
    def max_patches(self) -> int:
        return max(self.max_pixels // self.patch_size**2, self.merge_size**2)

    @property
    def row_values(self) -> int:
        """Values of a token: its embedding, and what is added at later layers."""
        return self.hidden_size * (1 + self.num_deep)


def why_no_images(config: Mapping[str, Any], source: ModelSource, served_by: str | None = None) -> str:
    """Return why the engine takes no images; "" if it takes them.

    config: the checkpoint's config.json.
    served_by: see `aerie.workers.models.config.ModelConfig`.
    """
    architecture, folder = architecture_of(config), source.folder
    if source.images == "off":
        return "model.images is off"
    if not isinstance(config.get("vision_config"), dict):
        return "the model has no vision tower"
    if architecture not in FAMILIES:
        return f"images of {architecture} are not supported; those of {', '.join(FAMILIES)} are"
    if served_by is not None or source.implementation != "auto":
        return "models that are served through transformers take no images"
    if (folder / INDEX).is_file():
        return "GGUF files are served without their vision tower"
    if not (folder / PREPROCESSOR).exists() and not (folder / PROCESSOR).exists():
        return f"{folder} has no {PREPROCESSOR}"
    return ""


def why_without_images(source: ModelSource, served_by: str | None = None) -> str:
    """Return `why_no_images` for the folder of a model that sees; "" for a model of text alone."""
    config = read_json(source.folder / CONFIG)
    return why_no_images(config, source, served_by) if isinstance(config.get("vision_config"), dict) else ""


def read_vision(config: Mapping[str, Any], source: ModelSource, served_by: str | None = None) -> VisionConfig | None:
    """Return the images of a checkpoint; None if the engine takes none (`why_no_images`). Raises ValueError for
    settings that are not supported."""
    if why_no_images(config, source, served_by):
        return None
    name, family = f"model {source.path}", FAMILIES[architecture_of(config)]
    tower = section_of(config, "vision_config", name)
    token = config.get("image_token_id", config.get("image_token_index"))
    if not isinstance(token, int):
        raise ValueError(f"{name}: config.json has no image_token_id; download it again, or set model.images=off")
    return _READERS[family.kind](config, source, family, tower, token)


def _read_qwen(
    config: Mapping[str, Any], source: ModelSource, family: VisionFamily, tower: Mapping[str, Any], token: int
) -> VisionConfig:
    """Read the tower of Qwen2-VL and its successors. token: id of the image token."""
    name = f"model {source.path}"
    sizes = {key: _one(tower, key, name) for key in ("patch_size", "spatial_merge_size", "temporal_patch_size")}
    hidden_key = "hidden_size" if family.package == "qwen2_vl" else "out_hidden_size"
    return VisionConfig(
        family=family,
        tower=tower,
        image_token_id=token,
        filler_id=token,
        patch_size=sizes["patch_size"],
        frames=sizes["temporal_patch_size"],
        merge_size=sizes["spatial_merge_size"],
        hidden_size=size_of(tower, hidden_key, name),
        num_deep=len(tower.get("deepstack_visual_indexes") or ()) if family.package.startswith("qwen3_vl") else 0,
        max_pixels=source.max_image_pixels,
        whole=False,
        has_mrope=True,
    )


def _read_gemma3(
    config: Mapping[str, Any], source: ModelSource, family: VisionFamily, tower: Mapping[str, Any], token: int
) -> VisionConfig:
    """Return the images of Gemma 3, which all have the tower's size."""
    name, patch_size = f"model {source.path}", _one(tower, "patch_size", f"model {source.path}")
    side = size_of(tower, "image_size", name) // patch_size  # patches
    per_side = math.isqrt(size_of(config, "mm_tokens_per_image", name, 256))  # tokens
    merge_size = side // per_side
    if per_side * merge_size != side:
        raise ValueError(
            f"{name}: config.json: mm_tokens_per_image: {side} x {side} patches do not make {per_side} x "
            f"{per_side} tokens; correct it, or set model.images=off"
        )
    return VisionConfig(
        family=family,
        tower=tower,
        image_token_id=token,
        filler_id=token,
        patch_size=patch_size,
        frames=1,
        merge_size=merge_size,
        hidden_size=size_of(section_of(config, "text_config", name), "hidden_size", name),
        num_deep=0,
        max_pixels=side**2 * patch_size**2,
        whole=True,
        has_mrope=False,
        fixed=True,
    )


def _read_gemma4(
    config: Mapping[str, Any], source: ModelSource, family: VisionFamily, tower: Mapping[str, Any], token: int
) -> VisionConfig:
    """Return the images of Gemma 4, whose largest size the checkpoint sets, not `model.max_image_pixels`."""
    name, text = f"model {source.path}", section_of(config, "text_config", f"model {source.path}")
    patch_size, merge_size = _one(tower, "patch_size", name), size_of(tower, "pooling_kernel_size", name, 3)
    max_tokens = size_of(image_settings(source.folder), "max_soft_tokens", name, 280)
    return VisionConfig(
        family=family,
        tower=tower,
        image_token_id=token,
        # the embedding that each layer has of its own is that of this token
        filler_id=size_of(text, "pad_token_id", name, 0, min_value=0),
        patch_size=patch_size,
        frames=1,
        merge_size=merge_size,
        hidden_size=size_of(text, "hidden_size", name),
        num_deep=0,
        max_pixels=max_tokens * merge_size**2 * patch_size**2,
        whole=text.get(_BIDIRECTIONAL) == "vision",
        has_mrope=False,
    )


_Read = Callable[[Mapping[str, Any], ModelSource, VisionFamily, Mapping[str, Any], int], VisionConfig]
_READERS: Mapping[Kind, _Read] = {"qwen": _read_qwen, "gemma3": _read_gemma3, "gemma4": _read_gemma4}


def image_settings(folder: Path) -> Mapping[str, Any]:
    """Return the settings of a checkpoint's image processor, from the file that transformers prefers."""
    nested = read_json(folder / PROCESSOR).get("image_processor")
    settings: Mapping[str, Any] = nested if isinstance(nested, dict) else read_json(folder / PREPROCESSOR)
    return settings


def vision_of(source: ModelSource, served_by: str | None = None) -> VisionConfig | None:
    """Do `read_vision` for the folder of a model."""
    return read_vision(read_json(source.folder / CONFIG), source, served_by)


_DEFAULTS = {"spatial_merge_size": 2, "temporal_patch_size": 2}
_BIDIRECTIONAL = "use_bidirectional_attention"


def _one(tower: Mapping[str, Any], key: str, name: str) -> int:
    """Return a size that may be written as a list of equal numbers."""
    value = tower.get(key)
    if isinstance(value, list | tuple) and len(set(value)) == 1:
        tower = {**tower, key: value[0]}
    return size_of(tower, key, name, _DEFAULTS.get(key))
