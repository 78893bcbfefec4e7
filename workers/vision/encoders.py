"""`ImageEncoder`: a family's vision tower, which is transformers' own modules, from pixels to embeddings."""

import importlib
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from aerie.workers.vision.config import CHANNELS, VisionConfig

Grid = tuple[int, int, int]  # frames, rows and columns of patches
_WINDOW = 112  # pixels of Qwen2.5-VL's windows, if config.json does not say


class ImageEncoder(nn.Module):
    """See the module.

    prefixes: of the tower's tensors in checkpoints, without a first `model.`, and of the names of its parameters.
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

    def own_name(self, name: str) -> str | None:
        """Return the parameter for a checkpoint's tensor; None for a tensor of another module."""
        name = name.removeprefix("model.")
        for theirs, own in self.prefixes.items():
            if name.startswith(theirs):
                return own + name.removeprefix(theirs)
        return None


class QwenEncoder(ImageEncoder):
    prefixes: ClassVar[Mapping[str, str]] = {"visual.": "tower."}

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self._config = config
        self.tower = _built(config, config.family.config, config.family.tower)
        self._vision_utils = _vision_utils()

    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        rows = pixels.unsqueeze(2).expand(-1, -1, self._config.frames, -1).reshape(pixels.shape[0], -1)
        dtype, device = next(self.tower.parameters()).dtype, pixels.device
        out = self.tower(
            rows.to(dtype), grid_thw=torch.tensor([grid], device=device), **self._spans(grid, device, pixels.shape[0])
        )
        return torch.cat((out.pooler_output, *(getattr(out, "deepstack_features", None) or ())), dim=1)

    @property
    def blocks(self) -> nn.ModuleList:
        blocks: nn.ModuleList = self.tower.blocks
        return blocks

    def _spans(self, grid: Grid, device: torch.device, num_patches: int) -> dict[str, Tensor]:
        """Return the bounds of the patches that attend to each other, on the host: every layer reads them there, and
        would wait for the device. Empty for a transformers that computes them itself."""
        if self._vision_utils is None:
            return {}
        config = self._config
        spans = {"cu_seqlens": torch.tensor([0, num_patches], dtype=torch.int32, device="cpu")}
        window = config.tower.get("window_size", _WINDOW) if config.family.package == "qwen2_5_vl" else None
        if window is not None:
            on_host = torch.tensor([grid], device="cpu")
            sizes = (config.merge_size, window, config.patch_size)
            index, spans["cu_window_seqlens"] = self._vision_utils.get_vision_window_index(on_host, *sizes)
            spans["window_index"] = index.to(device)
        return spans


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
        _, rows, columns = grid
        side = int(pixels.shape[2] ** 0.5)
        whole = pixels.view(rows, columns, CHANNELS, side, side).permute(2, 0, 3, 1, 4)
        whole = whole.reshape(1, CHANNELS, rows * side, columns * side)
        hidden = self.tower(pixel_values=whole.to(self.projector.mm_input_projection_weight.dtype)).last_hidden_state
        out: Tensor = self.projector(hidden)[0]
        return out

    @property
    def blocks(self) -> nn.ModuleList:
        blocks: nn.ModuleList = self.tower.encoder.layers
        return blocks


class Gemma4Encoder(ImageEncoder):
    prefixes: ClassVar[Mapping[str, str]] = {"vision_tower.": "tower.", "embed_vision.": "embedder."}

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        family = config.family
        self.tower = _built(config, family.config, family.tower)
        text = _class(family.model_package, "configuration", "Gemma4TextConfig")(hidden_size=config.hidden_size)
        embedder = _class(family.model_package, "modeling", "Gemma4MultimodalEmbedder")
        self.embedder = embedder(self.tower.config, text)

    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        _, rows, columns = grid
        row, column = (torch.arange(n, device=pixels.device) for n in (rows, columns))
        places = torch.stack((column.repeat(rows), row.repeat_interleave(columns)), dim=1)
        patches = pixels.transpose(1, 2).reshape(1, pixels.shape[0], -1)
        hidden = self.tower(pixel_values=patches, pixel_position_ids=places.unsqueeze(0)).last_hidden_state
        out: Tensor = self.embedder(hidden)
        return out

    @property
    def blocks(self) -> nn.ModuleList:
        blocks: nn.ModuleList = self.tower.encoder.layers
        return blocks


_ENCODERS: Mapping[str, type[Any]] = {"gemma3": Gemma3Encoder, "gemma4": Gemma4Encoder}


def build_encoder(config: VisionConfig) -> ImageEncoder:
    """Return the encoder of a family, without weights, on the default device."""
    encoder: ImageEncoder = _ENCODERS.get(config.family.model_package, QwenEncoder)(config)
    return encoder


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
