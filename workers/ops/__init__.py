"""Operations of models, sampling and slots: one module each, with contract and reference on top. Kernels are in
siblings named after their library.

`attention.ops.operation` defines what an operation is. `python -m workers.ops` prints which implementation runs where.
"""
