"""Draft trees.

shape  `TreeShape`: how deep and wide a tree is, and every number that follows from it; the shapes an engine has
nodes  the nodes of trees as tensors, and the simplest trees
"""
