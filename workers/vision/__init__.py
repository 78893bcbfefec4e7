"""Images of prompts: from the client's bytes to the embeddings of placeholder tokens.

config          which checkpoints take images, and their sizes; no torch
positions       M-RoPE positions of a prompt with images
tower           the vision tower on a rank
encoders        the towers of the families
fused           fused modules in place of transformers'
fusing          which modules these replace
piecewise       runs a tower a few blocks at a time
processor       decodes and resizes an image with the checkpoint's processor, in a process of its own
"""
