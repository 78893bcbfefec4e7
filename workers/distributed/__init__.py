"""Communication between the ranks of a tensor-parallel engine.

tp_group           `TPGroup`, which layers get: sums, gathers, this rank and their number
custom_all_reduce  all-reduces between the GPUs of one node without NCCL; chooses one by message size
shared_memory      all-reduces and gathers between the CPUs of one machine without gloo
agreement          what ranks exchange before they choose how to communicate
ports              a free port of this machine, where ranks meet
"""
