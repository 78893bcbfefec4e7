"""Speculation as a `workers.runner.decoding.DecodingStrategy`.

tree: the shapes of draft trees, and their nodes as tensors.
ops: acceptance, growth of trees and other operations of a round.
decoding: a step, from verification to the next tree.
step_parts: what its stages hand on, and what it emits.
tree_table: the tree of every slot.
drafter: the draft's own steps.
guidance: drafts under grammars.
draft_backlog: the draft's KV of plain rounds, written several rounds at a time.
draft_models: EAGLE and EAGLE-3 heads, their published checkpoints and what must fit.
backends: which attention backend serves which mode.
build, local: an engine that speculates.
training: making a draft for a target.
"""
