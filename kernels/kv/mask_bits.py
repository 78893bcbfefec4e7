"""Limits of a round's masks (`aerie.kernels.kv.tree_masks`). Without torch: plans read them."""

MAX_NODES = 256  # maximum nodes of a tree, with its root
MASK_BITS = 63  # usable bits of a signed 64-bit integer that is not negative
