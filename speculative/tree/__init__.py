"""Draft trees.

shape  `TreeShape`: depth, branching and width, and all sizes that follow; the shapes of an engine
nodes  trees as tensors: tokens, parents, depths and tree masks
"""
