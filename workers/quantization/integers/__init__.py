"""Weights of 4- or 8-bit integers with 16-bit activations (W4A16, W8A16).

readers of quantization_config
    awq, gptq, auto_round, pack_quantized
scheme          `IntScheme`: gives layers their methods; `SchemeQuant`: a scheme per module
    experts
format          `IntFormat`: the tensors of each layout; shards and reads them
packing         packs for `aerie.kernels.packed`, in the order of `input_order`; a matrix's tensors until they are
                packed
"""
