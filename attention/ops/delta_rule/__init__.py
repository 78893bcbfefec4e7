"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464): a layer's core between its projections and output product.

tables    the tensors: a layer's state, weights and rows, and the inputs that all layers of a pass share
rounds    verification and decoding: replays the committed rows, then computes the new rows, for trees of any shape
chunks    prompt chunks
commit    moves the accepted rows of all layers to where the next round replays them
formulas  convolution, gates, recurrence and gated norm in torch, for the references

A round reads and writes the state once, whatever the number of its rows. Verified rows leave the state unchanged; the
layer stores their projections (*pending* rows). Acceptance moves the rows of the accepted path to the *committed* rows,
which the next round replays before it computes its own rows.
"""
