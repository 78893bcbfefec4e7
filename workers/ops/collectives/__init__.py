"""Collectives between the GPUs of one node, over memory that each can reach.

one_shot_all_reduce  the sum of a few rows, with the residual add and RMSNorm that follow it
"""
