"""Operations of a speculative round: one module each, with contract and reference. Triton kernels are in the module
NAME_triton. `aerie.attention.ops.operation` defines operations.

acceptance    finds the accepted path of each tree, and commits it to the slots
tree_read     reads the trees to verify, as rows of the target
tree_growth   adds a level to draft trees, and selects the nodes to verify
head_input    the input of an EAGLE-3 layer: two concatenated norms
block_head    convolutions and candidates' scores of a DFlash2 head
guides        drafting under grammars: states, forced tokens, masks
suffix_match  drafts copied from the request's own text
"""
