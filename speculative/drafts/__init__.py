"""Draft methods: each proposes a tree of scored nodes.

method             `DraftMethod` and `DraftModel`, the interface
registry           all methods, and the draft that a configuration names
recognition        the method of a checkpoint
eagle, eagle3, mtp the methods
gemma4_assistant   Gemma 4's draft, which attends to the target's KV
trimmed_head       the target's vocabulary head, reduced to the most frequent tokens
drafter            the steps that draft a tree of one shape, and the draft's runner; layers of EAGLE and EAGLE-3
                   models
guidance           drafting under grammars
eagle3_config      config.json of published EAGLE-3 heads; layout and weight names of EAGLE-3 checkpoints
config             checks that a draft fits its target
loading            loads weights; shares the target's embedding and vocabulary head
checkpoint_files   reads tensors from safetensors files or a pickle
"""
