"""Quantised weights of checkpoints: storage and matrix products.

integers/       W4A16 and W8A16: AWQ, GPTQ, AutoRound, compressed-tensors' pack-quantized
quant_method    `QuantMethod`: chooses the method of a checkpoint's layers; finds the modules that a
                quantization_config names
table           all quantisations, by their names in config.json
floats          FP8, MXFP4 and NVFP4: `FloatQuant`, and readers of quantization_config; tensors of 4-bit floats
fp8_weight      FP8 weights: layout of scales, dummy weights, dequantisation
fp8_linear      linear layers and experts that stay in FP8 if the GPU multiplies FP8
block_scheme    the block types of GGUF files, decoded, and layers of such blocks
packed_linear   storage of low-bit matrices in checkpoints, and linear layers of such matrices
packed_experts  experts of such matrices
kv_scheme       the dtype of the KV cache, by the checkpoint's scheme
"""
