"""Kernels for CPUs in C++, compiled at the first start.

library.py    compiles and loads them
weight.py     weights of 4 to 32 bits in the order in which the CPU reads them
products.py   GEMMs with these weights
rows.py       norms, activations, RoPE and the write of K/V
attention.py  attention over pages

Rows are float32, and sums are float32. A row's result depends neither on the other rows nor on their number, so greedy
answers are equal with and without speculation, alone and in a batch.
"""
