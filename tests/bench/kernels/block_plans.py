"""Tiles of products with 4-bit weights that `tests.bench packed` compares, and `tests.bench round` takes by name."""

from workers.ops.packed.tiles import BlockPlan

VARIANTS: dict[str, BlockPlan] = {
    "64 outputs, 2 a processor": BlockPlan(False, 240),
    "64 outputs, 4 a processor": BlockPlan(False, 480),
    "128 outputs, 2 a processor": BlockPlan(True, 240),
    "128 outputs, 4 a processor": BlockPlan(True, 480),
    "128 outputs, ordered rows": BlockPlan(True, 240, max_direct_rows=0),
    "2 warp groups, ordered rows": BlockPlan(False, 240, stages=3, warpgroups=2, max_direct_rows=0),
}
