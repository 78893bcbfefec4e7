"""How the ranks of one tensor-parallel engine talk. Below it are operations alone.

tp_group           `TPGroup`: what layers are given; sums, gathers, and who this rank is of how many
custom_all_reduce  sums between the GPUs of one node without NCCL, and by which message size which one runs
shared_memory      sums and gathers between the CPUs of one machine without gloo
agreement          what ranks tell each other before they choose how to talk
ports              a free port of this machine, where ranks can meet
"""
