"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464): the part of a layer between its input and output
projections.

tables    the tensors: a layer's state, weights and rows, and the inputs that all layers of a pass share
rounds    verification and decoding: replays the committed rows, then computes the new rows, for trees of any shape;
          moves the accepted rows of all layers to the committed rows
chunks    prompt chunks
wide_rounds_triton  rounds whose committed and new rows exceed a tile
recurrence_triton  rounds and chunks of deterministic engines, token by token
formulas  convolution, gates, recurrence and gated norm in torch, for the references

A round reads and writes the state once, for any number of rows; a wide round reads it once more. Verified rows do not
change the state; the layer stores their projections (*pending* rows). After acceptance, the rows of the accepted path
become *committed* rows, which the next round replays before it computes its own rows.
"""
