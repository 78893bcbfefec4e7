"""EAGLE speculation as a `workers.runner.decoding.DecodingStrategy`.

`decoding`: a step, from verification to the next tree. `tree`, `acceptance`: pure functions on tensors. `drafter`:
the draft's own steps. `backends`: which attention backend serves which mode. `heads`: EAGLE and EAGLE-3 heads.
`draft_config`, `loading`: published checkpoints and what must fit. `training`: making a head for a target.
"""
