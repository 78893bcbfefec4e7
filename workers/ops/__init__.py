"""Operations of models, sampling and slots: one module each, with contract and reference. Kernels are in modules named
*_triton or *_cuda.

`aerie.attention.ops.operation` defines operations. `python -m aerie.workers.ops` prints which implementations run here.
"""
