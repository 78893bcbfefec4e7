"""Quantised weights of checkpoints: storage and matrix products.

integers/      W4A16 and W8A16: AWQ, GPTQ, AutoRound, compressed-tensors' pack-quantized
quant_method   `QuantMethod`: chooses the method of a checkpoint's layers
table          all quantisations, by their names in config.json
module_lists   finds the modules named by entries of a quantization_config
floats         FP8, MXFP4 and NVFP4: `FloatQuant`, and readers of quantization_config
fp8_weight     FP8 weights: loading, dummy weights, dequantisation; fp8_linear, fp8_experts: layers that keep them if
               the GPU multiplies FP8
fp4_scheme     tensors of 4-bit floats
block_types    the block types of GGUF files, decoded; block_scheme: layers of such blocks
separate_parts layers whose matrices have different schemes
packed_scheme  storage of low-bit matrices in checkpoints; packed_linear, packed_experts: layers of such matrices
"""
