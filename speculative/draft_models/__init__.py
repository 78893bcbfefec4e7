"""What drafts, one file per method.

method: `DraftMethod` and `DraftModel`, the interface.
registry: the methods that exist, and which one a checkpoint is of.
eagle, eagle3, mtp: the methods.
eagle3_config: what the config.json of published EAGLE-3 heads says, and what of it is refused.
eagle3_checkpoint: what EAGLE-3's serving and training know of its published layout.
layers: what their models are made of.
config: whether a checkpoint fits its target.
loading: weights, and what a draft takes from its target.
checkpoint_files: tensors, of safetensors files or a pickle.
vocabulary: which of the target's tokens a draft has.
"""
