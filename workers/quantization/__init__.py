"""What checkpoints' weights may be quantised to, how they are kept, and how they are multiplied by.

quant_method   `QuantMethod`: which method a checkpoint's layers get
table          the quantisations that we know, by their names in config.json
block_fp8      FP8 with a scale for each block of rows and columns (DeepSeek, Qwen)
channel_fp8    FP8 with a scale for each output, of compressed-tensors
fp8_quant      what both have in common: which layers; fp8_weight: loading, dummies, what weights mean
fp8_linear     a linear layer that keeps its weight in FP8 where the GPU multiplies by it
fp8_experts    the same for stacked experts
"""
