"""Adaptive tree shapes against each static one, and none.

adaptive       on a GPU, with dummy weights and synthetic acceptance
adaptive_pair  on the embedded pair, whose acceptance is real
"""
