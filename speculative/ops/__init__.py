"""Operations of a speculative round: one module each, its contract and reference on top, its Triton kernels in a
sibling whose name ends in _triton. `attention.ops.operation` says what an operation is.

acceptance    finds the accepted path of each tree, and commits it to the slots
tree_read     reads the trees to verify, as rows of the target
tree_growth   adds a level to draft trees, and selects the nodes to verify
head_input    the input of an EAGLE-3 layer: two norms, side by side
block_head    convolutions and candidates' scores of a DFlash2 head
guides        drafting under grammars: states, forced tokens, masks
suffix_match  drafts copied from the request's own text
"""
