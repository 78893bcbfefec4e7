"""Triton kernels of a round's small steps, each beside its torch reference. Imported on GPUs only.

accept_commit  the path that the target agrees with, and what it changes in the slot
read_trees     the rows of the pending trees, as the target verifies them
head_input     what an EAGLE-3 head reads: two norms, side by side
tree_growth    one step of drafting: the best children, and the tree that is kept
"""
