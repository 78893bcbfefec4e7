"""Collectives between the GPUs of one node, over peer memory.

one_shot_all_reduce  all-reduce of a few rows, with residual addition and RMSNorm
sum_in_order         sum of all ranks' parts in rank order
"""
