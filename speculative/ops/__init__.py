"""Operations of a speculative round: one module each, its contract and reference on top, its Triton kernels in a
sibling whose name ends in _triton. `attention.ops.operation` says what an operation is.

acceptance   the path that the target agrees with, and what it changes in the slot
tree_read    the pending trees' rows, as the target verifies them
tree_growth  one level of drafting: the best children; and the tree that is kept of all levels
head_input   what an EAGLE-3 head reads: two norms, side by side
guides       drafting under grammars: states, forced tokens, masks
"""
