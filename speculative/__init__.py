"""Speculative decoding, as a `aerie.workers.runner.decoding.DecodingStrategy`.

decoding: one step, from verification to the next tree.
suffix_drafts: drafts copied from the requests' own text, without a model.
step_parts: values passed between its stages, and its output; the draft's KV of several non-speculative rounds.
drafts: EAGLE, EAGLE-3 and MTP drafts, their checkpoints, and the steps that draft a tree.
tree_shape: shapes of draft trees.
tree_table: the tree of every slot.
speculation: the part of an engine's plan that speculates, with a draft or without a model.
build: an engine that speculates.
training: trains a draft for a target.
"""
