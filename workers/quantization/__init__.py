"""Quantised weights of checkpoints: how they are stored and multiplied.

integers/      W4A16 and W8A16: AWQ, GPTQ, AutoRound, compressed-tensors' pack-quantized
quant_method   `QuantMethod`: chooses the method of a checkpoint's layers
table          all quantisations, by their names in config.json
scheme          `Scheme`, and checkpoints with several; separate_parts: a layer whose matrices have several
module_lists    finds the modules named by entries of a quantization_config
fp8_quant      FP8 with a scale per block, output or matrix; fp8_weight: loading, dummy weights, dequantisation
fp8_linear     a linear layer that keeps its weight in FP8 if the GPU multiplies it
fp8_experts    the same for stacked experts
fp4            4-bit floats: MXFP4 and NVFP4; fp4_scheme: their tensors
packed_scheme   storage of matrices of few bits in checkpoints; packed_linear, packed_experts: layers of such matrices
"""
