"""Shapes of rounds against each other, and none.

adaptive        adaptive tree shapes on a GPU, with dummy weights and synthetic acceptance
adaptive_pair   the same on the embedded pair, whose acceptance is real
adapter_rounds  requests with LoRA adapters
rollouts        a batch with few long answers
"""
