"""Triton kernels of the models' small operations, each beside its torch reference. Imported on GPUs only."""
