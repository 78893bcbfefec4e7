"""KV memory and attention over it. Knows tensors and pages; no models, no requests, no Ray.

`pages`, `prefix_cache`: who holds which page, and which pages an earlier prompt left (pure Python). `kv_pool`: the
tensors. `metadata`: every ragged shape of a forward pass. `backend`: the interface and the table of backends;
`limits` what each can serve. `torch_backend` is the oracle, `triton_backend` with `kernels/` runs on GPUs,
`flashinfer_backend` and `trtllm_backend` call FlashInfer's kernels.
"""
