"""States of recurrent layers, of fixed size per request.

sizes   sizes of an engine's pool
layout  sizes of a layer's state, and groups of equal layers
pool    the memory of one model on one rank; the slots whose states a pass reads and writes
"""
