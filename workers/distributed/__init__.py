"""Communication between the ranks of a tensor-parallel engine.

tp_group           `TPGroup`, which layers use: all-reduce (in rank order for deterministic engines), all-gather
custom_all_reduce  all-reduces between the GPUs of one node without NCCL, chosen by message size
shared_memory      all-reduces and gathers between the CPUs of one machine without gloo
weight_transfer    weights from a trainer's process, beside steps
agreement          exchanges between ranks before they choose how to communicate
ports              a free port of this machine, for the rendezvous of ranks
"""
