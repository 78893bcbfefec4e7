"""IBM's Granite 3, dense and with experts, and Granite 4 without recurrent layers.

config   `GraniteConfig` and its reader
model    layers and names of tensors
"""
