"""Speculative decoding, as a `workers.runner.decoding.DecodingStrategy`.

decoding: one step, from verification to the next tree.
step_parts: values passed between its stages, and its output.
suffix: drafts copied from the requests' own text, without a model.
drafts: EAGLE, EAGLE-3 and MTP drafts, their checkpoints, and the steps that draft a tree.
tree: tree shapes, and nodes as tensors.
tree_table: the tree of every slot.
ops: acceptance, tree growth and other operations of a round.
draft_backlog: writes the draft's KV of several non-speculative rounds at a time.
backends: chooses the draft's attention backends.
suffix_speculation: an engine that speculates without a draft model.
build, local: an engine that speculates.
training: trains a draft for a target.
"""
