"""Quantised weights of checkpoints: storage and matrix products.

integers/      W4A16 and W8A16: AWQ, GPTQ, AutoRound, compressed-tensors' pack-quantized
quant_method   `QuantMethod`: chooses the method of a checkpoint's layers; finds the modules named by entries of a
               quantization_config
table          all quantisations, by their names in config.json
floats         FP8, MXFP4 and NVFP4: `FloatQuant`, and readers of quantization_config; tensors of 4-bit floats
fp8_weight     FP8 weights: loading, dummy weights, dequantisation; fp8_linear, fp8_experts: layers that keep them if
               the GPU multiplies FP8
block_scheme   the block types of GGUF files, decoded; block_scheme: layers of such blocks
separate_parts layers whose matrices have different schemes
packed_linear  storage of low-bit matrices in checkpoints; packed_linear, packed_experts: layers of such matrices
"""
