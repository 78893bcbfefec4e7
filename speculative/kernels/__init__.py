"""Triton kernels of a round's small steps, each beside its torch reference. Imported on GPUs only."""
