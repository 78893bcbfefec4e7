"""Tensors of gated-delta-rule layers: their state on the device, and the inputs that all layers of a pass share.

A token has C = 2 * Hk * dk + Hv * dv channels: q, k and v of all heads before the convolution, in this order. A *row*
is a token's input of a layer's recurrence: its C channels, then b [Hv] and a [Hv] before the gates, then zeros up to
`row_size`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aerie.kernels.capability import MULTIPROCESSORS

TAPS = 4  # taps of the convolution
HISTORY = TAPS - 1  # earlier tokens that a token's convolution reads
MAX_ROWS = 63  # maximum rows of a request in a round; masks are int64, not negative
_ROW_ALIGNMENT = 16  # numbers; aligns rows for vector loads
TICKETS = MULTIPROCESSORS  # programs share a head only where each has a multiprocessor


@dataclass(frozen=True)
class DeltaHeads:
    """Sizes of a layer on one rank. Value head h reads key head h // (value_heads // key_heads)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        assert self.value_heads % self.key_heads == 0

    @property
    def group(self) -> int:
        """Value heads of one key head."""
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:
        """Channels of a token, C."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def row_size(self) -> int:
        """Numbers in a row, including padding."""
        return -(-(self.channels + 2 * self.value_heads) // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


@dataclass(frozen=True)
class LayerState:
    """One layer's part of `DeltaState`: the same tensors without their first dimension."""

    heads: DeltaHeads
    state: Tensor
    conv: Tensor
    pending: Tensor
    committed: Tensor
    saved_state: Tensor
    saved_conv: Tensor
    count: Tensor
    tickets: Tensor


@dataclass(frozen=True)
class DeltaState:
    """State of L layers for S slots, the padding slot S, and N snapshots.

    state:     [L, S + 1, Hv, dk, dv] float32, before the committed rows.
    conv:      [L, S + 1, 3, C] of the model's dtype: channels of the last three tokens that `state` includes, the
               newest last; zeros before the first token.
    pending:   [L, S + 1, W, row_size] of the model's dtype: rows of the last round; W = rows of the widest round.
    committed: [L, S + 1, P, row_size], accepted rows after `state`; P = nodes of the longest path.
    saved_state: [L, N, Hv, dk, dv] float32 or bfloat16, snapshots of `state`.
    saved_conv:  [L, N, 3, C], of `conv`.
    count:     [S + 1] int32, committed rows of each slot, for all layers; always 0 for the padding slot.
    tickets:   [TICKETS] int32, zero between launches: programs of a wide round that have finished their part of a head.

    Invariant between steps: `state` of slot s is that after seq_len[s] - count[s] tokens; the tokens after it are
    committed[:, s, :count[s]]. When a request enters a slot, the slot's count is 0.
    """

    heads: DeltaHeads
    state: Tensor
    conv: Tensor
    pending: Tensor
    committed: Tensor
    saved_state: Tensor
    saved_conv: Tensor
    count: Tensor
    tickets: Tensor

    @staticmethod
    def zeros(
        layers: int,
        heads: DeltaHeads,
        slots: int,
        snapshots: int,
        rows: int,
        path: int,
        dtype: torch.dtype,
        device: torch.device,
        saved_dtype: torch.dtype = torch.float32,
    ) -> "DeltaState":
        """Allocate the state of empty slots. rows: W. path: P. dtype: of rows; states are float32 (float64 if `dtype`
        is, for tests). saved_dtype: of saved_state."""
        assert path <= rows <= MAX_ROWS
        full = torch.float64 if dtype is torch.float64 else torch.float32
        dtypes = {"state": full, "saved_state": full if full is torch.float64 else saved_dtype}
        shapes = state_shapes(heads, rows, path)
        saved = {f"saved_{name}": shapes[name] for name in ("state", "conv")}
        sizes = {name: (slots + 1, *shape) for name, shape in shapes.items()}
        sizes |= {name: (snapshots, *shape) for name, shape in saved.items()}
        tensors = {
            name: torch.zeros((layers, *size), dtype=dtypes.get(name, dtype), device=device)
            for name, size in sizes.items()
        }
        count, tickets = (torch.zeros(size, dtype=torch.int32, device=device) for size in (slots + 1, TICKETS))
        return DeltaState(heads, **tensors, count=count, tickets=tickets)

    @property
    def padding_slot(self) -> int:
        return self.count.shape[0] - 1

    def layer(self, index: int) -> LayerState:
        """Return views of one layer."""
        names = ("state", "conv", "pending", "committed", "saved_state", "saved_conv")
        own = {name: getattr(self, name)[index] for name in names}
        return LayerState(self.heads, **own, count=self.count, tickets=self.tickets)


KERNEL_DIMS = (16, 32, 64, 128)  # dk and dv
KERNEL_LIMITS = "dk and dv powers of 2 from 16 to 128; rows not float64"
FEW_ROWS = 16  # rows of a tile (committed keys, new keys, queries): one tensor-core operand
FEW_CUDA_ROWS = 24  # the same for the CUDA C++ kernel: 48 KB of shared memory
# Limit for a tile with committed and new rows. With keys and values of 128 in float32, a tile of 64 rows needs 256 KB
# of shared memory (227 exist), and 192 KB without committed rows (`tests.kernels.delta_rule.test_delta_compile`).
MAX_TILE_ROWS = 32


def fits_kernels(layer: LayerState) -> bool:
    """Whether the kernels support a layer of these sizes."""
    dims = (layer.heads.key_dim, layer.heads.value_dim)
    return all(dim in KERNEL_DIMS for dim in dims) and layer.state.dtype is torch.float32


def state_shapes(heads: DeltaHeads, rows: int, path: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of `DeltaState`'s tensors for one layer and slot."""
    return {
        "state": (heads.value_heads, heads.key_dim, heads.value_dim),
        "conv": (HISTORY, heads.channels),
        "pending": (rows, heads.row_size),
        "committed": (path, heads.row_size),
    }


@dataclass(frozen=True)
class DeltaWeights:
    """A layer's weights on one rank.

    conv:    [4, C] of the model's dtype, contiguous; the last tap is the token's own.
    a_log:   [Hv] float32.
    dt_bias: [Hv] float32.
    norm:    [dv] of the model's dtype or float32.
    eps:     of the gated norm.
    sigmoid: the output gate is sigmoid(z) instead of silu(z).
    """

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float
    sigmoid: bool = False


@dataclass(frozen=True)
class AllWeights:
    """The weights of the L layers of a `DeltaState`.

    addresses: [L, 3] int64, of each layer's conv, a_log and dt_bias.
    """

    layers: tuple[DeltaWeights, ...]
    addresses: Tensor

    @staticmethod
    def of(layers: Sequence[DeltaWeights]) -> "AllWeights":
        """Weights may change in place later, but not move."""
        addresses = [[each.data_ptr() for each in (own.conv, own.a_log, own.dt_bias)] for own in layers]
        return AllWeights(tuple(layers), torch.tensor(addresses, dtype=torch.int64, device=layers[0].conv.device))


@dataclass(frozen=True)
class DeltaRows:
    """Projections of N rows in the model's dtype, last stride 1; views of one GEMM's output, or separate tensors.

    qkv: [N, C].
    z:   [N, Hv * dv], the output gate.
    b:   [N, Hv], beta = sigmoid(b).
    a:   [N, Hv], g = -exp(a_log) * softplus(a + dt_bias).
    """

    qkv: Tensor
    z: Tensor
    b: Tensor
    a: Tensor

    def part(self, start: int, stop: int) -> "DeltaRows":
        """Return rows start .. stop - 1."""
        return DeltaRows(self.qkv[start:stop], self.z[start:stop], self.b[start:stop], self.a[start:stop])


@dataclass(frozen=True)
class RoundTables:
    """B requests of R rows each in a pass; the same for all layers.

    slots:        [B] int64, distinct except for the padding slot of padding rows.
    prefix_len:   [B] int32, committed tokens before the first row.
    mask:         [B, R] int64, bit j of row i: node j is i or an ancestor of i. Bit 0 and bit i are set, bits above i
                  are not; R <= min(63, W). A row outside of the request's tree may have any mask of this form; it is no
                  node's ancestor, and its output is finite.
    snapshot_at:  [S + 1] int32, by slot: number of tokens after which the state is saved; -1 for none.
    snapshot_entry: [S + 1] int64, by slot: index of that snapshot.
    fixed:        a row's result must depend on its path only, bit for bit, in rounds and in chunks.
    replayed:     `replay_rows` has replayed the committed rows in this pass; only if `is_wide`.
    """

    slots: Tensor
    prefix_len: Tensor
    mask: Tensor
    snapshot_at: Tensor
    snapshot_entry: Tensor
    fixed: bool = False
    replayed: bool = False

    def is_wide(self, path: int) -> bool:
        """Whether the rows and `path` committed ones exceed a tile, so that `replay_rows` may replay the committed rows
        of all layers at once."""
        width = self.mask.shape[1]
        return not self.fixed and width > 1 and width + path > MAX_TILE_ROWS


@dataclass(frozen=True)
class ChunkTables:
    """N_c prompt chunks of a pass; the same for all layers. Chunk c has rows qo_indptr[c] .. qo_indptr[c + 1] - 1,
    counted from the first chunk row; rows from qo_indptr[N_c] on are padding.

    slots:        [N_c] int64; any slot for chunks without rows.
    qo_indptr:    [N_c + 1] int32.
    starts:       [N_c] int32, position of each chunk's first row.
    snapshot_at:  [N_c] int32, number of tokens after which the state is saved, starts < snapshot_at <= starts + rows;
                  -1 for none.
    snapshot_entry: [N_c] int64, index of that snapshot.
    fixed:        as in `RoundTables`.
    """

    slots: Tensor
    qo_indptr: Tensor
    starts: Tensor
    snapshot_at: Tensor
    snapshot_entry: Tensor
    fixed: bool = False


def check_layer(rows: DeltaRows, weights: DeltaWeights, layer: LayerState, out: Tensor) -> None:
    """Assert what the kernels demand of a layer's rows, weights and state. Reads no values."""
    heads, dtype = layer.heads, rows.qkv.dtype
    assert rows.qkv.shape[1] == heads.channels and out.dtype == dtype == weights.conv.dtype == layer.pending.dtype
    for each, size in (rows.z, heads.value_dim), (rows.b, 1), (rows.a, 1), (out, heads.value_dim):
        assert each.shape[1] == heads.value_heads * size and each.dtype == dtype and each.stride(1) == 1
    assert rows.qkv.stride(1) == 1 and weights.conv.shape == (TAPS, heads.channels) and weights.conv.is_contiguous()
    for weight in (weights.a_log, weights.dt_bias):
        assert weight.shape == (heads.value_heads,) and weight.dtype == layer.state.dtype and weight.is_contiguous()
    assert weights.norm.shape == (heads.value_dim,) and weights.norm.dtype in (dtype, torch.float32)
    assert layer.state.is_contiguous() and layer.conv.is_contiguous()
