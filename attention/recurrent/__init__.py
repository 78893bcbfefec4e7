"""What recurrent layers keep of a request: a state of fixed size, where attention keeps KV for every token.

sizes   what an engine asks of the pool
layout  sizes of a layer's state, and the layers that are alike
pool    the memory of one model on one rank
batch   which slots' states the rows of a pass read and write
"""
