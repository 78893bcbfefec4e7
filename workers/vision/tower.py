"""`VisionTower`: the vision tower of a rank, which computes the embeddings of images.

It is transformers' own module with the checkpoint's weights, whole on every rank. It runs eagerly, before the pass of
the step that needs the first token of an image.
"""

import importlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from aerie.workers.config import ModelSource
from aerie.workers.models.config import ModelConfig
from aerie.workers.models.llama import LlamaConfig
from aerie.workers.models.weights import checkpoint_tensors, first_names
from aerie.workers.prompt_inputs import Image, ImageSizes
from aerie.workers.scheduling.encoded_images import EncodedImages
from aerie.workers.vision.config import CHANNELS, VisionConfig
from aerie.workers.vision.processor import load_processor

PREFIXES = ("model.visual.", "visual.")  # of the tower's tensors in checkpoints
CACHE_BYTES = 1 << 28  # of images' embeddings; at least twice the largest image's
_DUMMY_STD = 0.02
_WINDOW = 112  # pixels of Qwen2.5-VL's windows, if config.json does not say
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # quantised towers are refused


def image_sizes(config: VisionConfig, target: ModelConfig, dtype: torch.dtype) -> ImageSizes:
    """Return the sizes of a model's images on a rank. dtype: of the target. Raises ValueError if its parts do not fit
    together."""
    assert isinstance(target, LlamaConfig), "the families with images"
    sections, num_frequencies = target.rope.sections, target.rotated_dim // 2
    for name, given, wanted in (
        ("text_config: mrope_section", sum(sections), num_frequencies),
        ("vision_config: the size of embeddings", config.hidden_size, target.hidden_size),
        (
            "vision_config: the number of deepstack_visual_indexes",
            config.num_deep,
            min(config.num_deep, target.num_layers - 1),
        ),
    ):
        if given != wanted:
            raise ValueError(f"config.json: {name}: is {given}, must be {wanted}; correct it, or set model.images=off")
    row_bytes = config.row_values * dtype.itemsize
    largest = config.max_patches // config.merge_size**2 * row_bytes
    with torch.device("meta"):
        tower = _module(config)
    weights = sum(each.numel() for each in tower.parameters()) * dtype.itemsize
    return ImageSizes(
        merge_size=config.merge_size,
        patch_bytes=config.patch_bytes,
        max_patches=config.max_patches,
        row_bytes=row_bytes,
        cache_bytes=max(CACHE_BYTES, 2 * largest),
        tower_bytes=weights,
        num_axes=len(sections),
    )


class VisionTower:
    """Encodes images, and keeps the embeddings of those used last."""

    def __init__(
        self, config: VisionConfig, source: ModelSource, sizes: ImageSizes, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Load the weights. Raises ValueError, naming the tensor, if the checkpoint does not fit."""
        self._config = config
        self._sizes = sizes
        self._device = device
        self._module = _loaded(config, source, dtype, device)
        processor = load_processor(source.path) if source.load_format != "dummy" else None
        self._scale, self._mean, self._std = _constants(processor, device)
        self._vision_utils = _vision_utils()
        self._known = EncodedImages(sizes.cache_bytes)
        self._embeddings: dict[bytes, Tensor] = {}

    def rows(self, image: Image) -> Tensor:
        """Return [image.num_rows, row_values] in the model's dtype: the embedding of each token, then what is added to
        the residual stream at later layers. Images must come in the order of the plans."""
        num_tokens = image.num_patches // self._config.merge_size**2
        if image.digest not in self._known:
            assert image.data, "the scheduler sends the pixels of images that are not kept"
            self._embeddings[image.digest] = self.encode(image)
        for dropped in self._known.use(image.digest, num_tokens * self._sizes.row_bytes):
            del self._embeddings[dropped]
        return self._embeddings[image.digest][image.first_row : image.first_row + image.num_rows]

    @torch.inference_mode()
    def encode(self, image: Image) -> Tensor:
        """Return the rows of all tokens of an image."""
        values = torch.frombuffer(bytearray(image.data), dtype=torch.uint8).to(self._device)
        pixels = values.view(image.num_patches, CHANNELS, 1, -1).float()
        pixels = pixels.mul_(self._scale).sub_(self._mean).div_(self._std)
        pixels = pixels.expand(-1, -1, self._config.frames, -1).reshape(image.num_patches, -1)
        grid = torch.tensor([image.grid], device=self._device)
        out = self._module(pixels.to(self._dtype), grid_thw=grid, **self._spans(image))
        return torch.cat((out.pooler_output, *(getattr(out, "deepstack_features", None) or ())), dim=1)

    def _spans(self, image: Image) -> dict[str, Tensor]:
        """Return the bounds of the patches that attend to each other, on the host: every layer reads them there, and
        would wait for the device. Empty for a transformers that computes them itself."""
        if self._vision_utils is None:
            return {}
        spans = {"cu_seqlens": torch.tensor([0, image.num_patches], dtype=torch.int32, device="cpu")}
        window = self._config.tower.get("window_size", _WINDOW) if self._config.family.package == "qwen2_5_vl" else None
        if window is not None:
            grid = torch.tensor([image.grid], device="cpu")
            sizes = (self._config.merge_size, window, self._config.patch_size)
            index, spans["cu_window_seqlens"] = self._vision_utils.get_vision_window_index(grid, *sizes)
            spans["window_index"] = index.to(self._device)
        return spans

    def encode_largest(self) -> None:
        """Encode an image of the largest size, to measure its memory."""
        merged, patches = self._config.merge_size, self._sizes.max_patches
        side = max(int(patches**0.5) // merged, 1) * merged
        self.encode(Image.of(0, 1, (1, side, side), bytes(side * side * self._sizes.patch_bytes)))

    @property
    def _dtype(self) -> torch.dtype:
        return next(self._module.parameters()).dtype


def _vision_utils() -> Any:
    """Return transformers' module for the bounds of patches; None for a version without it."""
    try:
        return importlib.import_module("transformers.vision_utils")
    except ImportError:
        return None


def _module(config: VisionConfig) -> nn.Module:
    family = config.family
    package = f"transformers.models.{family.package}"
    settings = getattr(importlib.import_module(f"{package}.configuration_{family.package}"), family.config)
    tower = getattr(importlib.import_module(f"{package}.modeling_{family.package}"), family.tower)
    own = settings(**dict(config.tower))
    own._attn_implementation = "sdpa"
    module: nn.Module = tower(own)
    return module


def _loaded(config: VisionConfig, source: ModelSource, dtype: torch.dtype, device: torch.device) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:  # buffers are computed, so they cannot be on the meta device
            module = _module(config)
    finally:
        torch.set_default_dtype(before)
    if source.load_format == "dummy":
        generator = torch.Generator(device).manual_seed(source.seed)
        with torch.no_grad():
            for each in module.parameters():
                each.normal_(0.0, _DUMMY_STD, generator=generator)
        return module.eval()
    _fill(module, _tensors_of(source), f"model {source.path}")
    return module.eval()


def _tensors_of(source: ModelSource) -> Iterable[tuple[str, Tensor]]:
    for name, tensor, _ in checkpoint_tensors(source.path):
        for prefix in PREFIXES:
            if name.startswith(prefix):
                yield name.removeprefix(prefix), tensor


def _fill(module: nn.Module, tensors: Iterable[tuple[str, Tensor]], name: str) -> None:
    """Copy the checkpoint's tensors. Raises ValueError for missing ones, and for wrong shapes."""
    left = dict(module.named_parameters())
    with torch.no_grad():
        for key, tensor in tensors:
            if key not in left:
                continue
            own = left.pop(key)
            if own.shape != tensor.shape or tensor.dtype not in _DTYPES:
                raise ValueError(
                    f"{name}: vision tower: {key} is {tensor.dtype} of shape {tuple(tensor.shape)}, config.json "
                    f"implies 16 or 32 bits and {tuple(own.shape)}; download it again, or set model.images=off"
                )
            own.copy_(tensor)
    if left:
        raise ValueError(
            f"{name}: vision tower: the checkpoint has no {first_names(sorted(left))}; download it again, or set "
            "model.images=off"
        )


def _constants(processor: Any, device: torch.device) -> tuple[float, Tensor, Tensor]:
    """Return the factor of pixel values, and the mean and deviation of each channel, [channels, 1, 1]."""

    def spread(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device).view(CHANNELS, 1, 1)

    if processor is None:
        return 1 / 255, spread([0.5] * 3), spread([0.5] * 3)
    scale = processor.rescale_factor if processor.do_rescale else 1.0
    if not processor.do_normalize:
        return scale, spread([0.0] * 3), spread([1.0] * 3)
    return scale, spread(processor.image_mean), spread(processor.image_std)
