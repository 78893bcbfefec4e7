"""Operations that models, sampling and slots are written with: one module each, its contract and reference on top,
its kernels in siblings named after the library that they are written in. `attention.ops.operation` says what an
operation is; `python -m workers.ops` prints which implementation runs where.
"""
