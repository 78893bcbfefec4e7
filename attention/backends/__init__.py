"""The attention backends, one file each; `attention.registry` imports the one that is chosen, when it is chosen.

torch_backend       plain PyTorch: the oracle of all others, and the backend of CPUs
triton_backend      our Triton kernels: the default on GPUs
flashinfer_backend  FlashInfer's fa2 and fa3
trtllm_backend      FlashInfer's TensorRT-LLM decode kernels
"""
