"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464): a layer's core between its projections and output product.

tables    tensors: a layer's state, weights and rows, and the inputs shared by the layers of a pass
rounds    verification and decoding: replay of the committed rows, then the new rows, trees of any shape
chunks    prompt chunks
commit    moves the accepted rows of all layers to where the next round replays them
formulas  convolution, gates, recurrence and gated norm in torch, used by the references

A round reads the state once and writes it once, whatever the number of its rows. Verified rows change no state: the
layer keeps them as they come from the projections (*pending* rows). Acceptance moves the rows of the accepted path to
the *committed* rows, and the next round replays these before it computes its own rows.
"""
