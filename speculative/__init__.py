"""Speculation as a `workers.runner.decoding.DecodingStrategy`.

tree: the shapes of draft trees, and their nodes as tensors.
ops: acceptance, growth of trees and other operations of a round.
decoding: a step, from verification to the next tree.
step_parts: what its stages hand on, and what it emits.
tree_table: the tree of every slot.
draft_backlog: the draft's KV of plain rounds, written several rounds at a time.
drafts: EAGLE, EAGLE-3 and MTP drafts, their published checkpoints, and the steps that draft a tree.
backends: which attention backend serves which mode.
build, local: an engine that speculates.
training: making a draft for a target.
"""
