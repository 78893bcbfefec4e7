"""`aerie quantize`: a checkpoint of fewer bits from one of 16 or 32, in compressed-tensors' formats.

command       checks that the library is installed, then calls `checkpoint`
checkpoint    the steps: read, check, measure, convert, measure
schemes       what `--scheme` may be, and the quantization_config of each
matrices      the matrices of a model that can be quantised, by its own layers
rounding      scales by search, and codes by rounding or by error compensation (GPTQ)
calibration   second moments of the layers' inputs, from texts that the model reads
texts         rows as tokens, and the loss of a model on them
writer        the new folder, shard by shard

Weights pass one matrix at a time, so a checkpoint may be larger than memory. Codes are packed by compressed-tensors.
"""
