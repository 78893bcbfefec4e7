"""Draft trees of a speculative round.

nodes        trees, levels and candidates as tensors
tree_growth  adds a level to draft trees, and selects the nodes to verify; grows the best trees of a number of nodes,
             for drafts whose levels need no pass each
tree_read    reads the trees to verify, as rows of the target
acceptance   finds the accepted path of each tree, and commits it to the slots

Triton kernels are in NAME_triton, numpy implementations for CPUs in NAME_host.
"""
