"""What drafts: each method proposes a tree of scored nodes.

method             `DraftMethod` and `DraftModel`, the interface
registry           the methods that exist, and the method of a checkpoint
eagle, eagle3, mtp the methods
mtp_deepseek, mtp_qwen  modules of these families
drafter            the steps that draft a tree of one shape, and the draft's runner
guidance           drafting under grammars
eagle3_config      the config.json of published EAGLE-3 heads, and which of its values are refused
eagle3_checkpoint  the published layout of EAGLE-3 checkpoints, for serving and training
layers             layers of EAGLE and EAGLE-3 models
config             checks that a draft fits its target
loading            weights, and what a draft takes from its target
checkpoint_files   tensors of safetensors files or a pickle
vocabulary         which of the target's tokens a draft has
"""
