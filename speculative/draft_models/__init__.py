"""What drafts, one file per method.

method: `DraftMethod` and `DraftModel`, the interface.
registry: the methods that exist, and which one a checkpoint is of.
eagle, eagle3, mtp: the methods.
eagle3_checkpoint: what EAGLE-3's serving and training know of its published layout.
layers: what their models are made of.
config: whether a checkpoint fits its target.
loading: weights, and what a draft takes from its target.
"""
