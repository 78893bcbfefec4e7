"""Quantised weights of checkpoints: storage and matrix products.

integers/      W4A16 and W8A16: AWQ, GPTQ, AutoRound, compressed-tensors' pack-quantized
quant_method   `QuantMethod`: chooses the method of a checkpoint's layers
table          all quantisations, by their names in config.json
scheme          `Scheme`, and checkpoints with several schemes; separate_parts: layers whose matrices have different
                schemes
module_lists    finds the modules named by entries of a quantization_config
fp8_quant      FP8 with a scale per block, output or matrix; fp8_weight: loading, dummy weights, dequantisation
fp8_linear     a linear layer with an FP8 weight, which stays FP8 if the GPU supports it
fp8_experts    the same for stacked experts
fp4            4-bit floats: MXFP4 and NVFP4; fp4_scheme: their tensors
packed_scheme   storage of low-bit matrices in checkpoints; packed_linear, packed_experts: layers of such matrices
"""
