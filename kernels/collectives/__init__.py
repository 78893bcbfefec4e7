"""Collectives between the GPUs of one node, over peer memory.

all_reduce           all-reduce of a few rows, with residual addition and RMSNorm; sum of all ranks' parts in rank
                     order
"""
