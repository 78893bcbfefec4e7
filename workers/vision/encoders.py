"""`ImageEncoder`: a family's vision tower, which is transformers' own modules or `fused` ones in their place, from
pixels to embeddings."""

import importlib
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from aerie.kernels.capability import Capability
from aerie.workers.vision.config import CHANNELS, Kind, VisionConfig
from aerie.workers.vision.fusing import fuse

Grid = tuple[int, int, int]  # frames, rows and columns of patches
# Patches of captured passes. An image is padded to the next size; steps of a quarter cost at most a fifth of the time.
# Larger images keep the device busy for as long as the host needs to launch their operations.
SIZES = (256, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072, 3840, 4608, 5376, 6400)
_WINDOW = 112  # pixels of Qwen2.5-VL's windows, if config.json does not say
_LONGEST = {"cu_seqlens": "max_seqlen", "cu_window_seqlens": "max_window_seqlen"}


class ImageEncoder(nn.Module):
    """See the module.

    prefixes: prefixes of the tower's tensors in checkpoints, without a first `model.`, and of the names of its
        parameters.
    """

    prefixes: ClassVar[Mapping[str, str]]

    @abstractmethod
    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        """Return [tokens, row_values]: the embedding of each token, then what is added to the residual stream at later
        layers.

        pixels: [patches, channels, pixels of a patch] float32, normalised.
        """

    @property
    @abstractmethod
    def blocks(self) -> nn.ModuleList:
        """The tower's layers, which `forward` calls in order."""

    merge_size = 1  # rows, and columns, of the patches of a token

    def captured_sizes(self, max_patches: int) -> Sequence[int]:
        """Return numbers of patches to capture passes of."""
        return [max_patches]

    def padded(self, grid: Grid, size: int) -> dict[str, Tensor] | None:
        """Return what `forward_padded` needs, on the host, for an image that is padded to `size` patches: tensors whose
        shapes depend on `size` alone. None if images cannot be padded."""
        return None

    def forward_padded(self, pixels: Tensor, layout: Mapping[str, Tensor]) -> Tensor:
        """`forward` without an operation that depends on values on the host, so that it can be captured.

        pixels: [size, channels, pixels of a patch].
        layout: result of `padded`, on the device. The rows of the image's tokens come first.
        """
        raise NotImplementedError

    def fuse(self, has_values: bool = True) -> Sequence[str]:
        """Replace modules by faster ones, after the weights are loaded. Parameters get other names and sizes. Return
        the classes of modules that might have been replaced and stay. has_values: see `fusing.fuse`."""
        return []

    def own_name(self, name: str) -> str | None:
        """Return the parameter for a checkpoint's tensor; None for a tensor of another module."""
        name = name.removeprefix("model.")
        for theirs, own in self.prefixes.items():
            if name.startswith(theirs):
                return own + name.removeprefix(theirs)
        return None


class QwenEncoder(ImageEncoder):
    """The towers of Qwen-VL models: images of any size, with the patches in windows or as a whole."""

    prefixes: ClassVar[Mapping[str, str]] = {"visual.": "tower."}

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self._config = config
        self.merge_size = config.merge_size
        self.tower = _built(config, config.family.config, config.family.tower)
        self.tower.patch_embed = _PatchEmbedding(self.tower.patch_embed.proj)
        self._vision_utils = _vision_utils()
        self._in_one_launch = False

    def fuse(self, has_values: bool = True, in_one_launch: bool | None = None) -> Sequence[str]:
        """Replace modules of the tower with fused ones. in_one_launch: see `fused.SpanAttention`; None: wherever it can
        be."""
        weight = next(self.tower.parameters())
        if in_one_launch is None:
            in_one_launch = Capability.of(weight.device).has_streams and weight.dtype.itemsize == 2
        self._in_one_launch = in_one_launch and self._vision_utils is not None
        return fuse(self.tower, self._in_one_launch, has_values)

    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        device = pixels.device
        layout, spans = self._layout(grid)
        layout_inputs: dict[str, Any] = {name: tensor.to(device, non_blocking=True) for name, tensor in layout.items()}
        if self._in_one_launch:
            layout_inputs |= {name: bounds.to(device, non_blocking=True) for name, bounds in spans.items()}
            layout_inputs |= {_LONGEST[name]: int(bounds.diff().max()) for name, bounds in spans.items()}
        else:
            layout_inputs |= spans  # each layer reads the bounds on the host
        return self._run(pixels, torch.tensor([grid], device=device), layout_inputs)

    def _run(self, pixels: Tensor, grid: Tensor, layout_inputs: Mapping[str, Any]) -> Tensor:
        rows = pixels.unsqueeze(2).expand(-1, -1, self._config.frames, -1).reshape(pixels.shape[0], -1)
        out = self.tower(rows.to(next(self.tower.parameters()).dtype), grid_thw=grid, **layout_inputs)
        return torch.cat((out.pooler_output, *(getattr(out, "deepstack_features", None) or ())), dim=1)

    @property
    def blocks(self) -> nn.ModuleList:
        blocks: nn.ModuleList = self.tower.blocks
        return blocks

    @property
    def _window(self) -> int | None:
        """Pixels of a window's side."""
        if self._config.family.package != "qwen2_5_vl":
            return None
        window: int = self._config.tower.get("window_size", _WINDOW)
        return window

    def _layout(self, grid: Grid) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return where patches lie, and the bounds of those that attend to each other, on the host: the tower would
        wait for the device several times. Empty for a transformers that computes them itself."""
        utils, merged = self._vision_utils, self._config.merge_size
        if utils is None:
            return {}, {}
        on_host = torch.tensor([grid], device="cpu")
        layout = {"position_ids": utils.get_vision_position_ids(on_host, merged)}
        spans = {"cu_seqlens": torch.tensor([0, grid[0] * grid[1] * grid[2]], dtype=torch.int32, device="cpu")}
        if self._window is not None:
            layout["window_index"], spans["cu_window_seqlens"] = utils.get_vision_window_index(
                on_host, merged, self._window, self._config.patch_size
            )
        if hasattr(self.tower, "pos_embed"):
            layout["interp_indices"], layout["interp_weights"] = utils.get_vision_interpolation_indices_and_weights(
                on_host,
                self.tower.num_grid_per_side,
                self.tower.interpolation_mode,
                self.tower.interpolation_align_corners,
                merged,
            )
        return layout, spans

    def captured_sizes(self, max_patches: int) -> Sequence[int]:
        return [size for size in SIZES if size <= max_patches]

    def padded(self, grid: Grid, size: int) -> dict[str, Tensor] | None:
        if not self._in_one_launch:
            return None
        layout, spans = self._layout(grid)
        num_patches, unit = grid[0] * grid[1] * grid[2], self._config.merge_size**2
        for name, tensor in layout.items():
            rows = size // unit if name == "window_index" else size
            more = torch.zeros((rows - len(tensor), *tensor.shape[1:]), dtype=tensor.dtype, device="cpu")
            if name == "window_index":
                more = torch.arange(len(tensor), rows, device="cpu")
            layout[name] = torch.cat((tensor, more))
        spans["cu_seqlens"] = torch.tensor([0, num_patches, size], dtype=torch.int32, device="cpu")
        if self._window is not None:  # padding patches have windows, too, and windows without patches come last
            bounds = spans["cu_window_seqlens"]
            more = torch.arange(num_patches, size, self._longest_window, dtype=torch.int32, device="cpu")[1:]
            bounds = torch.cat((bounds, more))
            # a thin image has the most windows: tokens / side + 1
            num_bounds = size // unit // self._window_side + 4
            spans["cu_window_seqlens"] = nn.functional.pad(bounds, (0, num_bounds - len(bounds)), value=size)
        return layout | spans

    @property
    def _window_side(self) -> int:
        """Tokens of a whole window's side."""
        assert self._window is not None
        return self._window // self._config.merge_size // self._config.patch_size

    @property
    def _longest_window(self) -> int:
        """Patches of a whole window."""
        return (self._window_side * self._config.merge_size) ** 2

    def forward_padded(self, pixels: Tensor, layout: Mapping[str, Tensor]) -> Tensor:
        layout_inputs: dict[str, Any] = {**layout, "max_seqlen": pixels.shape[0]}
        if self._window is not None:
            layout_inputs["max_window_seqlen"] = self._longest_window
        return self._run(pixels, torch.empty(0, 3), layout_inputs)  # the layout stands for the grid


class _PatchEmbedding(nn.Module):
    """The tower's convolution over patches that do not overlap, as the matrix product that it is: torch 2.9 and later
    have no fast convolution in three dimensions for bfloat16."""

    def __init__(self, proj: nn.Conv3d) -> None:
        super().__init__()
        self.proj = proj

    def forward(self, patches: Tensor) -> Tensor:
        """Return the embeddings of patches [patches, channels * frames * pixels]."""
        return nn.functional.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class Gemma3Encoder(ImageEncoder):
    """SigLIP, whose output is pooled and projected. All pictures have the same size."""

    prefixes: ClassVar[Mapping[str, str]] = {
        "vision_tower.vision_model.": "tower.",  # as published
        "vision_tower.": "tower.",
        "multi_modal_projector.": "projector.",
    }

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        family = config.family
        self.tower = _built(config, family.config, family.tower)
        whole = _class(family.model_package, "configuration", "Gemma3Config")(
            text_config={"hidden_size": config.hidden_size},
            vision_config=dict(config.tower),
            mm_tokens_per_image=config.max_patches // config.merge_size**2,
        )
        self.projector = _class(family.model_package, "modeling", "Gemma3MultiModalProjector")(whole)

    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        """Join the patches to one image [1, channels, height, width], and encode it."""
        _, rows, columns = grid
        side = int(pixels.shape[2] ** 0.5)
        whole = pixels.view(rows, columns, CHANNELS, side, side).permute(2, 0, 3, 1, 4)
        whole = whole.reshape(1, CHANNELS, rows * side, columns * side)
        hidden = self.tower(pixel_values=whole.to(self.projector.mm_input_projection_weight.dtype)).last_hidden_state
        out: Tensor = self.projector(hidden)[0]
        return out

    def padded(self, grid: Grid, size: int) -> dict[str, Tensor]:
        return {}

    def forward_padded(self, pixels: Tensor, layout: Mapping[str, Tensor]) -> Tensor:
        side = math.isqrt(pixels.shape[0])
        return self.forward(pixels, (1, side, side))

    @property
    def blocks(self) -> nn.ModuleList:
        blocks: nn.ModuleList = self.tower.encoder.layers
        return blocks


class Gemma4Encoder(ImageEncoder):
    """Its processor enlarges or reduces every picture to nearly the largest number of patches."""

    prefixes: ClassVar[Mapping[str, str]] = {"vision_tower.": "tower.", "embed_vision.": "embedder."}

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        family = config.family
        self.merge_size = config.merge_size
        self.tower = _built(config, family.config, family.tower)
        text = _class(family.model_package, "configuration", "Gemma4TextConfig")(hidden_size=config.hidden_size)
        embedder = _class(family.model_package, "modeling", "Gemma4MultimodalEmbedder")
        self.embedder = embedder(self.tower.config, text)

    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        places = _places(grid, pixels.device)
        hidden = self.tower(pixel_values=_flat_patches(pixels), pixel_position_ids=places).last_hidden_state
        out: Tensor = self.embedder(hidden)
        return out

    def padded(self, grid: Grid, size: int) -> dict[str, Tensor]:
        places = _places(grid, torch.device("cpu"))
        return {"places": nn.functional.pad(places, (0, 0, 0, size - places.shape[1]), value=_PADDING)}

    def forward_padded(self, pixels: Tensor, layout: Mapping[str, Tensor]) -> Tensor:
        """As transformers' forward pass, which asks the device whether there is padding, and how much."""
        tower, places = self.tower, layout["places"]
        padding = (places == _PADDING).all(dim=2)
        hidden = tower.patch_embedder(_flat_patches(pixels), places, padding)
        angles, mask = tower.encoder.rotary_emb(hidden, places), ~padding[:, None, None]
        for block in self.blocks:
            hidden = block(hidden, attention_mask=mask, position_embeddings=angles, position_ids=places)
        pooled, _ = tower.pooler(
            hidden_states=hidden,
            pixel_position_ids=places,
            padding_positions=padding,
            output_length=len(pixels) // self.merge_size**2,
        )
        if tower.config.standardize:
            pooled = (pooled - tower.std_bias.float()) * tower.std_scale.float()
        out: Tensor = self.embedder(pooled.to(hidden.dtype))[0]
        return out

    @property
    def blocks(self) -> nn.ModuleList:
        blocks: nn.ModuleList = self.tower.encoder.layers
        return blocks


_PADDING = -1  # position of padding patches in Gemma 4


def _places(grid: Grid, device: torch.device) -> Tensor:
    """Return [1, patches, 2] int64: column and row of each patch."""
    row, column = (torch.arange(n, device=device) for n in grid[1:])
    places = torch.stack((column.repeat(grid[1]), row.repeat_interleave(grid[2])), dim=1)
    return places.unsqueeze(0)


def _flat_patches(pixels: Tensor) -> Tensor:
    """Return [1, patches, pixels of a patch * channels]."""
    return pixels.transpose(1, 2).reshape(1, pixels.shape[0], -1)


ENCODERS: Mapping[Kind, Callable[[VisionConfig], ImageEncoder]] = {
    "qwen": QwenEncoder,
    "gemma3": Gemma3Encoder,
    "gemma4": Gemma4Encoder,
}


def build_encoder(config: VisionConfig) -> ImageEncoder:
    """Return the encoder of a family, without weights, on the default device."""
    return ENCODERS[config.family.kind](config)


def _built(config: VisionConfig, settings: str, tower: str) -> Any:
    own = _class(config.family.package, "configuration", settings)(**dict(config.tower))
    own._attn_implementation = "sdpa"
    return _class(config.family.package, "modeling", tower)(own)


def _class(package: str, module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"transformers.models.{package}.{module}_{package}"), name)


def _vision_utils() -> Any:
    """Return transformers' module for the bounds of patches; None for a version without it."""
    try:
        return importlib.import_module("transformers.vision_utils")
    except ImportError:
        return None
