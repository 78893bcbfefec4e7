"""What the kernels of experts have in common: how weights lie, and how a product is cut into programs."""

from dataclasses import dataclass

from torch import Tensor

from workers.ops.experts.route import MAX_LISTED
from workers.ops.fp8.rows import FP8, GROUP
from workers.ops.gemm.tiles import MULTIPROCESSORS
from workers.span import Span

MAX_FEW_ROWS = MAX_LISTED  # as many as the matrix unit takes in any case


@dataclass(frozen=True)
class ExpertSizes:
    """Of a layer's experts on a rank.

    num_routed, num_shared: experts that rows are routed to, and that every row goes to.
    experts_per_token: of the routed ones. size, width: of rows that go in, and inside an expert. step: columns of the
        first product in 128 bytes.
    num_elsewhere: experts that rows are routed to on other ranks.
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
        """Of an expert's rows, when they choose evenly."""
        return self.experts_per_token / (self.num_routed + self.num_elsewhere)

    def most(self, rows: int) -> int:
        """Experts that so many rows use at most."""
        return min(self.num_routed, rows * self.experts_per_token) + self.num_shared

    def used(self, rows: int) -> float:
        """Those that they use when they choose evenly."""
        return self.num_routed * (1.0 - (1.0 - self.share) ** rows) + self.num_shared


@dataclass(frozen=True)
class ExpertWeights:
    """The experts of a layer on this rank, shared ones last, as the kernels read them; all contiguous.

    gate_up: [experts, 2 * width, size], of a 16-bit type or float8_e4m3fn; gates above what they gate. down: [experts,
        size, width], likewise.
    gate_up_scales, down_scales: of FP8, as `workers.ops.fp8.tiles.Fp8Matrix` has them, of each expert:
        float32 [experts, rows / 64, columns / 128], or [experts, rows, 1]; None for others.
    num_shared: experts that every row goes to.
    held: which of those that rows are routed to; None if all.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_scales: Tensor | None = None
    down_scales: Tensor | None = None
    num_shared: int = 0
    held: Span | None = None

    @property
    def num_experts(self) -> int:
        """Shared ones included."""
        return self.gate_up.shape[0]

    def sizes(self, slots: int) -> ExpertSizes:
        """slots: experts of a row, shared ones included."""
        shared, routed = self.num_shared, self.num_experts - self.num_shared
        elsewhere = 0 if self.held is None else self.held.total - routed
        return ExpertSizes(routed, shared, slots - shared, self.size, self.width, self.step, elsewhere)

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
        """Whether rows that go in have scales of groups; else of whole rows."""
        return self.gate_up_scales is not None and self.gate_up_scales.shape[1] != self.gate_up.shape[1]

    @property
    def step(self) -> int:
        """Columns of `gate_up` in 128 bytes."""
        return 128 // self.gate_up.element_size()


def fits_kernels(size: int, width: int) -> bool:
    """Whether the kernels of experts can read weights of these sizes on a rank."""
    return size % GROUP == 0 and width % GROUP == 0


@dataclass(frozen=True)
class ProductTiles:
    """How one of the two products is cut.

    block_n: outputs of a program, 64 or 128; of gates and what they gate so many each.
    splits: programs that share a sum. stages, warps: Triton's. blocks: of block_n outputs that a program has one after
        the other (`workers.ops.experts.tall_blocks_triton`). ahead: a program has one expert of one row, whose
        weights it reads before the wait.
    """

    block_n: int
    splits: int
    stages: int
    warps: int
    blocks: int = 1
    ahead: bool = False


@dataclass(frozen=True)
class ExpertTiles:
    """block_m: rows of a program. Inner activations have a scale for gate_up.block_n columns."""

    block_m: int
    gate_up: ProductTiles
    down: ProductTiles

    def inner_step(self, in_fp8: bool) -> int:
        """Columns of inner activations that a down-projection takes at a time: with one scale, in FP8."""
        return self.gate_up.block_n if in_fp8 else 64


@dataclass(frozen=True)
class InnerRows:
    """Inner activations of blocks of rows: of the few-row kernels, of all rows for each expert that is used.

    values: [blocks * block_m, width], of the weights' type. factors: float32 [blocks, width / block_n, block_m], what
        values of FP8 are to be multiplied by; else None, or of no use.
    """

    values: Tensor
    factors: Tensor | None


def block_of(rows: int) -> int:
    """Of a program that has so many rows; the matrix unit takes 16 at least."""
    return 16 if rows <= 16 else 1 << (rows - 1).bit_length()


def few_row_tiles(rows: int, sizes: ExpertSizes) -> ExpertTiles:
    """For `workers.ops.experts.few_rows_triton`: so many splits of the columns that the programs of the experts
    that `rows` rows use when they choose evenly are one wave of one to a multiprocessor, if they do not fill it
    without: each keeps about 140 KB on their way. Set by a sweep on an H200. Of one row
    down-projections are many small programs, which have room beside the gates' and read their weights while these
    end."""
    steps = sizes.size // sizes.step
    programs = sizes.used(rows) * sizes.width / 128
    splits = max(d for d in range(1, 17) if steps % d == 0 and (d == 1 or d * programs <= MULTIPROCESSORS))
    down_splits = 1
    while down_splits < 8 and down_splits * sizes.size / 128 < 1.5 * MULTIPROCESSORS:
        down_splits *= 2
    down = ProductTiles(128, down_splits, stages=4, warps=4)
    if rows == 1 and _fits_one_load(sizes):
        down = ProductTiles(128, sizes.most(1), stages=1, warps=8, ahead=True)
    return ExpertTiles(MAX_FEW_ROWS, ProductTiles(128, splits, stages=4, warps=8), down)


def _fits_one_load(sizes: ExpertSizes) -> bool:
    """Whether a tile of a down-projection has all inner columns, as `down_of_one_row` reads it: in FP8, 64 KB."""
    return sizes.step == 128 and sizes.width & (sizes.width - 1) == 0 and sizes.width <= 512


def workspace_size(sizes: ExpertSizes) -> tuple[int, int]:
    """Float32 cells and tickets of a `Workspace` for `few_row_tiles` of any number of rows, and for the routing."""
    each = [partial_sizes(rows, sizes, few_row_tiles(rows, sizes)) for rows in range(1, MAX_FEW_ROWS + 1)]
    experts = sizes.num_routed + sizes.num_shared
    return max(cells for cells, _ in each), max(experts, *(tickets for _, tickets in each))


def partial_sizes(rows: int, sizes: ExpertSizes, tiles: ExpertTiles) -> tuple[int, int]:
    """Cells and tickets for these tiles."""
    cells, num_tickets = 0, 1
    for product, places in (
        (tiles.gate_up, sizes.most(rows) * sizes.width // tiles.gate_up.block_n),
        (tiles.down, sizes.size // tiles.down.block_n),
    ):
        if product.splits > 1:
            twice = 2 if product is tiles.gate_up else 1
            cells = max(cells, twice * places * product.splits * product.block_n * tiles.block_m)
            num_tickets = max(num_tickets, places)
    return cells, num_tickets
