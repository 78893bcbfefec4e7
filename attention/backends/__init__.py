"""The attention backends, imported when they are built (`aerie.attention.registry`).

torch_backend        the reference, and the backend of CPUs
triton_backend       every mode, with our kernels; optionally deterministic; prompt chunks over keys and values
                     computed from latent rows
flashinfer_backend   FlashInfer's paged wrappers; `flashinfer_rounds` plans its kernels for rounds on the device
trtllm_backend       FlashInfer's TensorRT-LLM decode kernels
"""
