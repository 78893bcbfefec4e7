"""`aerie quantize`: quantises a 16- or 32-bit checkpoint into compressed-tensors' formats.

command       checks that the library is installed, then calls `checkpoint`
checkpoint    the steps: read, check, measure, convert, measure
schemes       the values of `--scheme`, and the quantization_config of each
matrices      the matrices of a model that can be quantised, found through its layers
rounding      scales by search, and codes by rounding or by error compensation (GPTQ); the new folder, shard by shard
calibration   second moments of the layers' inputs while the model reads texts; tokens of calibration texts, and a
              model's loss on them

Weights pass one matrix at a time, so a checkpoint may be larger than memory. Codes are packed by compressed-tensors.
"""
