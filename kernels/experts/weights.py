"""Layout of the experts' weights and tile sizes of their kernels."""

from dataclasses import dataclass, replace

from torch import Tensor

from aerie.kernels.capability import MULTIPROCESSORS
from aerie.kernels.experts.gated import SWIGLU, GatedActivation
from aerie.kernels.experts.route import MAX_LISTED
from aerie.kernels.fp8.rows import GROUP
from aerie.kernels.gemm.blocks import largest
from aerie.kernels.gemm.tiles import INPUT_STEP
from aerie.kernels.kv.stored_values import FP8
from aerie.kernels.span import Span

WIDTH_STEP = 8  # divisor of an expert's width; a tensor map's rows are multiples of 16 bytes
ORDERED_BLOCK = 64  # columns of inner activations per program, and per scale, in deterministic engines
MAX_FEW_ROWS = MAX_LISTED  # 16: the smallest tile of a tensor core


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of a layer's experts on this rank.

    num_routed, num_shared: routed experts, and shared experts, which every row uses.
    experts_per_token: routed experts per row.
    size: hidden size.
    width: intermediate size of an expert on this rank.
    step: columns per 128 bytes of the gate and up projections.
    num_elsewhere: routed experts on other ranks.
    """

    num_routed: int
    num_shared: int
    experts_per_token: int
    size: int
    width: int
    step: int
    num_elsewhere: int = 0

    @property
    def share(self) -> float:
        """Fraction of all rows that an expert gets under even routing."""
        return self.experts_per_token / (self.num_routed + self.num_elsewhere)

    def max_used(self, rows: int) -> int:
        """Maximum number of experts that `rows` rows use."""
        return min(self.num_routed, rows * self.experts_per_token) + self.num_shared

    def used(self, rows: int) -> float:
        """Expected number of experts that `rows` rows use under even routing."""
        return self.num_routed * (1.0 - (1.0 - self.share) ** rows) + self.num_shared


@dataclass(frozen=True)
class ExpertWeights:
    """The experts of a layer on this rank, shared ones last; all tensors contiguous.

    gate_up: [experts, 2 * width, size] of a 16-bit dtype or float8_e4m3fn; gate rows, then up rows.
    down: [experts, size, width], same dtype.
    gate_up_scales, down_scales: None without FP8; else as in `aerie.kernels.fp8.tiles.Fp8Matrix`, per expert:
        float32 [experts, rows / 64, columns / 128] or [experts, rows, 1].
    num_shared: shared experts.
    held: the routed experts on this rank; None: all.
    gate_up_bias, down_bias: [experts, 2 * width] and [experts, size] of a 16- or 32-bit dtype; None without, and in
        FP8.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_scales: Tensor | None = None
    down_scales: Tensor | None = None
    num_shared: int = 0
    held: Span | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: GatedActivation = SWIGLU

    @property
    def num_experts(self) -> int:
        """Experts on this rank, including shared ones."""
        return self.gate_up.shape[0]

    def sizes(self, slots: int) -> ExpertSizes:
        """Return the sizes. slots: experts per row, including shared ones."""
        shared, routed = self.num_shared, self.num_experts - self.num_shared
        elsewhere = 0 if self.held is None else self.held.total - routed
        return ExpertSizes(
            routed,
            shared,
            experts_per_token=slots - shared,
            size=self.size,
            width=self.width,
            step=self.step,
            num_elsewhere=elsewhere,
        )

    def without_shared(self) -> "ExpertWeights":
        """Return the routed experts, as views."""
        names = ("gate_up", "down", "gate_up_scales", "down_scales", "gate_up_bias", "down_bias")
        tensors = {
            name: tensor[: self.num_experts - self.num_shared]
            for name in names
            if (tensor := vars(self)[name]) is not None
        }
        return replace(self, **tensors, num_shared=0)

    @property
    def width(self) -> int:
        return self.down.shape[2]

    @property
    def size(self) -> int:
        return self.down.shape[1]

    @property
    def in_fp8(self) -> bool:
        return self.gate_up.dtype == FP8

    @property
    def by_group(self) -> bool:
        """Whether input rows have a scale per 128 columns, not one per row."""
        return self.gate_up_scales is not None and self.gate_up_scales.shape[1] != self.gate_up.shape[1]

    @property
    def step(self) -> int:
        """Columns of `gate_up` in 128 bytes."""
        return 128 // self.gate_up.element_size()


def fits_kernels(size: int, width: int) -> bool:
    """Whether all kernels support these sizes on a rank."""
    return size % GROUP == 0 and width % GROUP == 0


def fits_blocks(size: int, width: int) -> bool:
    """Whether `many_rows_triton` supports 16-bit weights of these sizes on a rank."""
    return size % INPUT_STEP == 0 and width % WIDTH_STEP == 0


@dataclass(frozen=True)
class ProductTiles:
    """Tiles of one of the two GEMMs.

    block_n: outputs per program, 64 or 128; for gate and up projections each.
    splits: programs that share a sum (split K).
    stages, warps: Triton's num_stages and num_warps.
    blocks: consecutive blocks of `block_n` outputs that a program computes.
    ahead: whether a program computes one expert of one row, and reads all weights before it waits
        (`aerie.kernels.pdl`).
    """

    block_n: int
    splits: int
    stages: int
    warps: int
    blocks: int = 1
    ahead: bool = False


@dataclass(frozen=True)
class ExpertTiles:
    """Tiles of the kernels of one layer's experts.

    block_m: rows per program. Inner activations have one scale per `gate_up.block_n` columns.
    weights_first: with 64 rows or more: whether weights are the tensor core's first operand, as with fewer rows.
    """

    block_m: int
    gate_up: ProductTiles
    down: ProductTiles
    weights_first: bool = False

    def inner_step(self, in_fp8: bool) -> int:
        """Columns per step of a down projection: in FP8, those that share a scale."""
        return self.gate_up.block_n if in_fp8 else 64


@dataclass(frozen=True)
class InnerRows:
    """Inner activations, in blocks of rows. The few-row kernels have one block of all rows per used expert.

    values: [blocks * block_m, width] in the weights' dtype.
    factors: float32 [blocks, width / block_n, block_m], scales of FP8 values; None or unused for other dtypes.
    """

    values: Tensor
    factors: Tensor | None


def block_of(rows: int) -> int:
    """Return the block size for `rows` rows: a power of two, at least 16 (a tensor core's smallest tile)."""
    return 16 if rows <= 16 else 1 << (rows - 1).bit_length()


def few_row_tiles(rows: int, sizes: ExpertSizes) -> ExpertTiles:
    """Return the tiles of `aerie.kernels.experts.few_rows_triton`, set by sweeps on an H200.

    Gate and up projections are split until one program per multiprocessor fills the device; each program has about 140
    KB in flight. For one row, down projections are many small programs, which fit on the device together with the gate
    and up projections, and read their weights at the same time. Such a program has one expert if one load holds all of
    that expert's inner columns, or, in FP8, if this rank has all experts.
    """
    steps = sizes.size // sizes.step
    programs = sizes.used(rows) * sizes.width / 128
    splits = max(d for d in range(1, 17) if steps % d == 0 and (d == 1 or d * programs <= MULTIPROCESSORS))
    down_splits = 1
    while down_splits < 8 and down_splits * sizes.size / 128 < 1.5 * MULTIPROCESSORS:
        down_splits *= 2
    gate_up, down = ProductTiles(128, splits, stages=4, warps=8), ProductTiles(128, down_splits, stages=4, warps=4)
    most, in_fp8 = sizes.max_used(1), sizes.step == 128
    if rows == 1 and fits_one_load(sizes.width):
        down = ProductTiles(sizes.step, most, stages=1, warps=8 if in_fp8 else 4, ahead=True)
        if not in_fp8 and steps % 2 == 0 and 4 * programs <= 1.25 * MULTIPROCESSORS:
            gate_up = ProductTiles(64, 2, stages=4, warps=4)
    elif rows == 1 and in_fp8 and sizes.used(1) > most - 0.5:  # this rank has all experts
        down = ProductTiles(128, min(most, 16), stages=3, warps=4)
    return ExpertTiles(MAX_FEW_ROWS, gate_up, down)


def fits_one_load(width: int) -> bool:
    """Whether one tile of a down projection holds all inner columns (64 KB), as kernels of one row need."""
    return width & (width - 1) == 0 and width <= 512


def workspace_size(sizes: ExpertSizes) -> tuple[int, int]:
    """Return float32 cells and tickets of a `Workspace` for the routing, all `few_row_tiles`, and
    `aerie.kernels.experts.ordered.ordered_rows_triton`."""
    per_rows = [partial_sizes(rows, sizes, few_row_tiles(rows, sizes)) for rows in range(1, MAX_FEW_ROWS + 1)]
    most = sizes.max_used(1)
    ordered = (most * max(2 * sizes.width, sizes.size), max(most * sizes.width // ORDERED_BLOCK, sizes.size // 128))
    return largest([(0, sizes.num_routed + sizes.num_shared), ordered, *per_rows])


def partial_sizes(rows: int, sizes: ExpertSizes, tiles: ExpertTiles) -> tuple[int, int]:
    """Return cells and tickets that these tiles need."""
    needed = [(0, 1)]
    for product, places in (
        (tiles.gate_up, sizes.max_used(rows) * sizes.width // tiles.gate_up.block_n),
        (tiles.down, sizes.size // tiles.down.block_n),
    ):
        if product.splits > 1:
            twice = 2 if product is tiles.gate_up else 1
            needed.append((twice * places * product.splits * product.block_n * tiles.block_m, places))
    return largest(needed)
