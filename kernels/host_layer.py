"""A decoder layer of float32 rows as one call on CPUs. For a small model, the calls of single operations from Python
take as long as the products: SmolLM2-135M has 240 of them for each token."""

from ctypes import Structure, byref, c_double, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from aerie.kernels.attend.rounds_cpp import MIN_SHARED_KEYS
from aerie.kernels.cpp_library import function
from aerie.kernels.gemm.host_cpp import scratch_size
from aerie.kernels.gemm.host_weight import HostWeight
from aerie.kernels.kv.batches import DecodeBatch, LayerKV
from aerie.kernels.rope.rope_store import Angles


class _Product(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("codes", "scales", "offsets", "bias")),
        *((name, c_int64) for name in ("outputs", "inputs", "group", "format")),
    ]


class _Layer(Structure):
    _fields_ = [
        *((name, _Product) for name in ("qkv", "o_proj", "gate_up", "down")),
        *((name, c_void_p) for name in ("norm", "k_pages", "v_pages")),
        *((name, c_int64) for name in ("heads", "kv_heads", "head_dim", "page_size", "window", "hidden")),
        ("scale", c_double),
        ("eps", c_double),
    ]


class _Pass(Structure):
    _fields_ = [
        *((n, c_void_p) for n in ("page_table", "prefix_len", "mask", "index", "slots", "cos", "sin", "scratch")),
        *((n, c_int64) for n in ("ld_table", "ld_mask", "ld_mask_row", "requests", "rows", "suffix_len", "half")),
        ("threads", c_int64),
        ("is_long", c_int64),
    ]


HostProduct = tuple[HostWeight, Tensor | None]
"""A weight, and a bias [outputs] float32."""


@dataclass(frozen=True)
class HostLayer:
    """A layer's weights: attention without norms of heads, gates and sinks, and a gated MLP with SiLU.

    qkv, o_proj, gate_up, down: weights, with biases [outputs] float32 or None.
    norm: [hidden] float32, weight of the norm before the MLP, with epsilon `eps`.
    window: maximum positions that a row sees; None: all.
    """

    qkv: HostProduct
    o_proj: HostProduct
    gate_up: HostProduct
    down: HostProduct
    norm: Tensor
    eps: float
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None

    def on(self, kv: LayerKV) -> "PlacedLayer":
        """Return the layer with its pages."""
        products = [_product(*pair) for pair in (self.qkv, self.o_proj, self.gate_up, self.down)]
        pages = kv.k.data_ptr(), kv.v.data_ptr()
        sizes = self.heads, self.kv_heads, self.head_dim, kv.k.shape[1], self.window or 0, self.norm.shape[0]
        layer = _Layer(*products, self.norm.data_ptr(), *pages, *sizes, self.scale, self.eps)
        return PlacedLayer(self, layer, kv.k.data_ptr())


@dataclass(frozen=True)
class PlacedLayer:
    """A layer's pointers as the C++ kernel reads them.

    weights: keep their memory.
    pages: address of the keys.
    """

    weights: HostLayer
    layer: _Layer
    pages: int

    def run(self, batch: "HostPass", normed: Tensor, residual: Tensor) -> Tensor:
        """Return the MLP's output [rows, hidden], and write residual + attention to `residual`.

        normed: [rows, hidden] float32, contiguous, the input norm's output.
        residual: as normed.
        """
        out = torch.empty_like(residual)
        batch.fit(self.weights)
        _function()(byref(self.layer), byref(batch.values), normed.data_ptr(), residual.data_ptr(), out.data_ptr())
        return out


class HostPass:
    """The batch of a pass, for all layers with the same angles."""

    def __init__(self, batch: DecodeBatch, angles: Angles, slot_mapping: Tensor) -> None:
        self._borrowed = batch, angles, slot_mapping  # keeps their memory
        self.num_rows, self.rows = batch.num_rows, batch.rows
        self._scratch = torch.empty(0, dtype=torch.float32)
        mask, table = batch.mask, batch.page_table
        pointers = table, batch.prefix_len, mask, angles.index, slot_mapping, angles.cos, angles.sin, self._scratch
        self.values = _Pass(*(pointer.data_ptr() for pointer in pointers))
        self.values.ld_table, self.values.ld_mask, self.values.ld_mask_row = table.stride(0), *mask.stride()
        self.values.requests, self.values.rows = batch.num_requests, batch.rows
        self.values.suffix_len, self.values.half = batch.suffix_len, angles.cos.shape[1]
        self.values.threads = torch.get_num_threads()
        self._keys = batch.num_rows * batch.max_kv_len

    def fit(self, layer: HostLayer) -> None:
        """Allocate the scratch memory that `layer` needs, unless an earlier layer needed as much."""
        self.values.is_long = self._keys * layer.heads >= MIN_SHARED_KEYS
        weights = [part[0] for part in (layer.qkv, layer.o_proj, layer.gate_up, layer.down)]
        wide = max(part.outputs for part in weights)
        size = 3 * self.num_rows * wide + max(scratch_size(part, self.num_rows) for part in weights)
        if self._scratch.shape[0] < size:
            self._scratch = torch.empty(size, dtype=torch.float32)
            self.values.scratch = self._scratch.data_ptr()


def _product(weight: HostWeight, bias: Tensor | None) -> _Product:
    tensors = (weight.codes, weight.scales, weight.offsets, bias)
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    return _Product(*pointers, weight.outputs, weight.inputs, weight.group, weight.format)


@cache
def _function() -> Any:
    return function("decoder_layer", *[c_void_p] * 5)
