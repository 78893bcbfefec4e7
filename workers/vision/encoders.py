"""`ImageEncoder`: a family's vision tower, which is transformers' own modules, from pixels to embeddings."""

import importlib
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from aerie.kernels.capability import Capability
from aerie.workers.vision.config import CHANNELS, VisionConfig

Grid = tuple[int, int, int]  # frames, rows and columns of patches
_WINDOW = 112  # pixels of Qwen2.5-VL's windows, if config.json does not say
_SPANS = "aerie_flash_spans"  # transformers passes bounds of spans to functions with "flash" in their name


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
        weight = next(self.tower.parameters())
        if Capability.of(weight.device).has_streams and weight.dtype.itemsize == 2 and self._vision_utils is not None:
            self.use_spans()

    def use_spans(self) -> None:
        """Attend in one launch a layer, instead of one a window. Needs a GPU and 16 bits."""
        importlib.import_module("transformers").AttentionInterface.register(_SPANS, attend_spans)
        self.tower.config._attn_implementation = _SPANS

    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        rows = pixels.unsqueeze(2).expand(-1, -1, self._config.frames, -1).reshape(pixels.shape[0], -1)
        dtype, device = next(self.tower.parameters()).dtype, pixels.device
        out = self.tower(rows.to(dtype), grid_thw=torch.tensor([grid], device=device), **self._layout(grid, device))
        return torch.cat((out.pooler_output, *(getattr(out, "deepstack_features", None) or ())), dim=1)

    @property
    def blocks(self) -> nn.ModuleList:
        blocks: nn.ModuleList = self.tower.blocks
        return blocks

    def _layout(self, grid: Grid, device: torch.device) -> dict[str, Any]:
        """Return where patches lie and the bounds of those that attend to each other, computed on the host: the tower
        would wait for the device several times. Empty for a transformers that computes them itself."""
        utils, config = self._vision_utils, self._config
        if utils is None:
            return {}
        in_one_launch = self.tower.config._attn_implementation == _SPANS
        on_host, merged = torch.tensor([grid], device="cpu"), config.merge_size
        layout: dict[str, Any] = {"position_ids": utils.get_vision_position_ids(on_host, merged)}
        spans = {"cu_seqlens": torch.tensor([0, grid[0] * grid[1] * grid[2]], dtype=torch.int32, device="cpu")}
        if config.family.package == "qwen2_5_vl":
            window = config.tower.get("window_size", _WINDOW)
            layout["window_index"], spans["cu_window_seqlens"] = utils.get_vision_window_index(
                on_host, merged, window, config.patch_size
            )
        if in_one_launch:
            longest = {"cu_seqlens": "max_seqlen", "cu_window_seqlens": "max_window_seqlen"}
            lengths = {longest[name]: int(bounds.diff().max()) for name, bounds in spans.items()}
            return _on_device(layout | spans, device) | lengths
        return _on_device(layout, device) | spans  # each layer reads the bounds on the host


def _on_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Any]:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}


def attend_spans(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend within spans of rows, with an interface of transformers' `AttentionInterface`.

    query, key, value: [1, heads, rows, dim], 16 bits, on a GPU. cu_seq_lens_q: int32 [spans + 1], there too. Returns
    [1, rows, heads, dim].
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    assert isinstance(out, Tensor)
    return out.unsqueeze(0), None


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
