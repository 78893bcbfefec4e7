"""`VisionTower`: the vision tower of a rank, which computes the embeddings of images.

It is transformers' own module with the checkpoint's weights and fused parts (`fused`). It is not sharded: every rank
has all of it. It runs before the pass of the step that needs the first token of an image: as CUDA graphs up to a size
(`captured`), or eagerly.
"""

import logging
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aerie.kernels.capability import Capability
from aerie.workers.config import ModelSource
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.models.config import ModelConfig
from aerie.workers.models.llama import LlamaConfig
from aerie.workers.models.weights import checkpoint_tensors, first_names
from aerie.workers.prompt_inputs import Encoding, Image, ImageSizes
from aerie.workers.scheduling.encoded_images import EncodedImages
from aerie.workers.timer import Timer
from aerie.workers.vision.captured import CapturedForward, record_parts
from aerie.workers.vision.config import CHANNELS, VisionConfig
from aerie.workers.vision.encoders import ImageEncoder, build_encoder
from aerie.workers.vision.piecewise import PiecewiseForward
from aerie.workers.vision.processor import check_processor, load_processor

CACHE_BYTES = 1 << 28  # of images' embeddings; at least twice the largest image's
_PAUSED_VALUES = 6  # times the hidden size, of a patch between two layers: hidden state, angles and residual
_DUMMY_STD = 0.02  # standard deviation of random weights (load_format=dummy)
COST_PATCHES = (256, 1024, 4096, 16384)  # of measured images
_COST_LIMIT_MS = 1500.0  # images that would take longer are not measured
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # quantised towers are refused

logger = logging.getLogger(__name__)


def image_sizes(config: VisionConfig, target: ModelConfig, dtype: torch.dtype) -> ImageSizes:
    """Return the sizes of a model's images on a rank. dtype: of the target. Raises ValueError if its parts do not fit
    together."""
    assert isinstance(target, LlamaConfig), "the families with images"
    sections, num_frequencies = target.rope.sections, target.rotated_dim // 2
    deep = min(config.num_deep, target.num_layers - 1)
    sizes = [("vision_config: the size of embeddings", config.hidden_size, target.hidden_size)]
    sizes += [("vision_config: the number of deepstack_visual_indexes", config.num_deep, deep)]
    if config.has_mrope:
        sizes.append(("text_config: mrope_section", sum(sections), num_frequencies))
    for name, actual, wanted in sizes:
        if actual != wanted:
            raise ValueError(f"config.json: {name}: is {actual}, must be {wanted}; correct it, or set model.images=off")
    row_bytes = config.row_values * dtype.itemsize
    largest = config.max_patches // config.merge_size**2 * row_bytes
    with torch.device("meta"):
        tower = build_encoder(config)
        tower.fuse(has_values=False)
    weights = sum(parameter.numel() for parameter in tower.parameters()) * dtype.itemsize
    return ImageSizes(
        merge_size=config.merge_size,
        patch_bytes=config.patch_bytes,
        max_patches=config.max_patches,
        row_bytes=row_bytes,
        cache_bytes=max(CACHE_BYTES, 2 * largest),
        tower_bytes=weights,
        num_axes=len(sections) if config.has_mrope else 1,
        whole=config.whole,
        num_blocks=len(tower.blocks),
        paused_bytes=_PAUSED_VALUES * config.max_patches * next(tower.blocks.parameters()).shape[-1] * dtype.itemsize,
    )


class VisionTower:
    """Encodes images, and caches the embeddings of those used last.

    whole: whether tokens of an image attend to later ones in the language model, so that one step must compute all of
        an image's tokens that are left.
    """

    def __init__(
        self,
        config: VisionConfig,
        source: ModelSource,
        sizes: ImageSizes,
        dtype: torch.dtype,
        device: torch.device,
        captures: bool = False,
    ) -> None:
        """Load the weights. sizes: from `image_sizes`. captures: whether passes may be CUDA graphs. Raises ValueError,
        naming the tensor, if the checkpoint does not fit."""
        self._config = config
        self._sizes = sizes
        self._device = device
        self._has_streams = Capability.of(device).has_streams
        self._encoder = _loaded(config, source, dtype, device)
        processor = load_processor(source.path) if source.load_format != "dummy" else None
        if processor is not None:
            check_processor(processor, config, source.path)
        self._scale, self._mean, self._std = _constants(processor, device)
        self.whole = sizes.whole
        self._known = EncodedImages(sizes.cache_bytes)  # which images are cached, in the order of their eviction
        self._embeddings: dict[bytes, Tensor] = {}  # their tensors, by digest
        self._pieces = PiecewiseForward(self._encoder.blocks, device)
        self._captured: CapturedForward | None = None
        if captures and Capability.of(device).captures_graphs:
            record = record_parts(torch.cuda.graph_pool_handle())
            pixels = config.patch_bytes // CHANNELS
            self._captured = CapturedForward(self._encoder, sizes.max_patches, pixels, device, record)
        self._partial = b""  # digest of the image whose pass has not ended

    def advance(self, encoding: Encoding) -> None:
        """Compute a part of an image, and cache its embeddings once it has ended."""
        image = encoding.image
        if image.digest in self._known:
            return
        captured = self._captured_for(image)
        if image.digest != self._partial:
            assert image.data, "the scheduler sends the pixels with the first part"
            self._abandon()
            if captured is None:
                self._pieces.start(lambda: self.encode(image))
            else:
                with torch.inference_mode():
                    captured.start(self._pixels(image), image.grid, self._num_tokens(image))
            self._partial = image.digest
        rows = (self._pieces if captured is None else captured).advance(encoding.num_blocks)
        if rows is not None:
            self._partial = b""
            self._remember(image, rows)

    def _remember(self, image: Image, rows: Tensor | None = None) -> None:
        """Mark an image as used last, and evict others for it. rows: its embeddings, if they are new."""
        if rows is not None:
            self._embeddings[image.digest] = rows
        for dropped in self._known.use(image.digest, self._num_tokens(image) * self._sizes.row_bytes):
            del self._embeddings[dropped]

    def rows(self, image: Image) -> Tensor:
        """Return [image.num_rows, row_values] in the model's dtype: the embedding of each token, then what is added to
        the residual stream at later layers. Images must come in the order of the plans."""
        is_new = image.digest not in self._known
        assert image.data or not is_new, "the scheduler sends the pixels of images that are not cached"
        self._remember(image, self.encode(image) if is_new else None)
        return self._embeddings[image.digest][image.first_row : image.first_row + image.num_rows]

    def row_buffer(self, num_rows: int) -> Tensor:
        """Return zeros for `rows` of so many tokens."""
        parameter = next(self._encoder.parameters())
        return torch.zeros((num_rows, self._config.row_values), dtype=parameter.dtype, device=self._device)

    @torch.inference_mode()
    def encode(self, image: Image) -> Tensor:
        """Return the rows of all tokens of an image."""
        captured, pixels = self._captured_for(image), self._pixels(image)
        if captured is not None:
            return captured.run(pixels, image.grid, self._num_tokens(image))
        out: Tensor = self._encoder(pixels, image.grid)
        return out

    def _captured_for(self, image: Image) -> CapturedForward | None:
        captured = self._captured
        return captured if captured is not None and captured.covers(image.num_patches) else None

    def _num_tokens(self, image: Image) -> int:
        return image.num_patches // self._config.merge_size**2

    def _pixels(self, image: Image) -> Tensor:
        """Return [patches, channels, pixels of a patch] float32, normalised."""
        values = torch.empty(len(image.data), dtype=torch.uint8, device="cpu", pin_memory=self._has_streams)
        values.numpy()[:] = np.frombuffer(image.data, np.uint8)
        pixels = values.to(self._device, non_blocking=True).view(image.num_patches, CHANNELS, -1).float()
        return pixels.mul_(self._scale).sub_(self._mean).div_(self._std)

    def clear(self) -> None:
        """Forget all images."""
        self._abandon()
        self._known.clear()
        self._embeddings.clear()

    def _abandon(self) -> None:
        """End a pass that is not continued."""
        self._pieces.abandon()
        if self._captured is not None:
            self._captured.abandon()
        self._partial = b""

    def costs(self, timer: Timer, group: TPGroup) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Return numbers of patches, ascending, and the milliseconds to encode an image of each on the slowest rank."""
        patches, times_ms = list[int](), list[float]()
        largest = self._sizes.max_patches
        smaller = () if self._config.fixed else (size for size in COST_PATCHES if size < largest)
        for image in map(self._square, (*smaller, largest)):
            if times_ms and times_ms[-1] * (image.num_patches / patches[-1]) ** 2 > _COST_LIMIT_MS:
                break
            runs = list[float]()
            while len(runs) < 2 and sum(runs) < _COST_LIMIT_MS / 4:  # the first one may choose kernels
                timer.mark()
                self.encode(image)
                timer.mark()
                own = torch.tensor(timer.read(), dtype=torch.float64, device=self._device)
                runs.append(float(group.all_gather(own).max()))
            patches.append(image.num_patches)
            times_ms.append(min(runs))
        return tuple(patches), tuple(times_ms)

    def encode_largest(self) -> None:
        """Encode an image of the largest size, to measure its memory."""
        self.encode(self._square(self._sizes.max_patches))

    def small(self) -> Image:
        """Return a black image of few tokens, or of the only size."""
        sizes = self._sizes
        return self._square(
            sizes.max_patches if self._config.fixed else min(16 * sizes.merge_size**2, sizes.max_patches)
        )

    def _square(self, num_patches: int) -> Image:
        """Return a black image of at most so many patches."""
        merged = self._config.merge_size
        tokens = max(math.isqrt(num_patches) // merged, 1)
        grid = 1, tokens * merged, tokens * merged
        return Image.of(0, tokens**2, grid, bytes(grid[1] * grid[2] * self._sizes.patch_bytes))


def _loaded(config: VisionConfig, source: ModelSource, dtype: torch.dtype, device: torch.device) -> ImageEncoder:
    """Load the tower, with Aerie's fused kernels where they fit."""
    encoder = _with_weights(config, source, dtype, device)
    if unfused := encoder.fuse():
        logger.warning(
            "model %s: vision tower: %s of transformers are not fused, so that pictures take longer",
            source.path,
            ", ".join(unfused),
        )
    return encoder.eval()


def _with_weights(config: VisionConfig, source: ModelSource, dtype: torch.dtype, device: torch.device) -> ImageEncoder:
    """Return the tower with the checkpoint's weights, or with random ones for `dummy`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:  # buffers are computed, so they cannot be on the meta device
            encoder = build_encoder(config)
    finally:
        torch.set_default_dtype(before)
    if source.load_format == "dummy":
        generator = torch.Generator(device).manual_seed(source.seed)
        with torch.no_grad():
            for parameter in encoder.parameters():
                parameter.normal_(0.0, _DUMMY_STD, generator=generator)
            for name, buffer in encoder.named_buffers():
                if name.endswith(("std_bias", "std_scale")):  # allocated without values
                    buffer.fill_(1.0)
        return encoder
    named = ((encoder.own_name(name), tensor) for name, tensor, _ in checkpoint_tensors(source.path))
    _fill(encoder, ((name, tensor) for name, tensor in named if name is not None), f"model {source.path}")
    return encoder


def _fill(module: ImageEncoder, tensors: Iterable[tuple[str, Tensor]], name: str) -> None:
    """Copy the checkpoint's tensors. Raises ValueError for missing ones, and for wrong shapes."""
    left = module.state_dict(keep_vars=True)
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
    """Return the factor of pixel values, and the mean and deviation of each channel, [channels, 1]."""

    def spread(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device).view(CHANNELS, 1)

    if processor is None:
        return 1 / 255, spread([0.5] * 3), spread([0.5] * 3)
    scale = processor.rescale_factor if processor.do_rescale else 1.0
    if not processor.do_normalize:
        return scale, spread([0.0] * 3), spread([1.0] * 3)
    return scale, spread(processor.image_mean), spread(processor.image_std)
