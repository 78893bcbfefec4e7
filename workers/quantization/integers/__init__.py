"""Weights of 4- or 8-bit integers with 16-bit activations (W4A16, W8A16).

methods         readers of quantization_config for layouts of GPTQ and AWQ
pack_quantized  the same for compressed-tensors' layout
scheme          `IntScheme`: gives layers and experts their methods; `SchemeQuant`: a scheme per module
format          `IntFormat`: the tensors of each layout; shards and reads them
packing         `StoredInt`: keeps a matrix's tensors until all have arrived, then packs them for
                `aerie.kernels.packed`; `InputOrder`: the order of inputs that makes groups adjacent
"""
