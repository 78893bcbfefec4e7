"""KV memory and attention over it. Knows tensors and pages; no models, no requests, no Ray.

distribution     name of the installed distribution, for remedies that name a package
config           configuration: page size and memory, backends by name
setting          the declaration of a configuration key, of any layer: check and spellings of its option
expansion        prompt chunks over latent rows with expanded keys and values, and when that pays
backend          the interface of attention backends
registry         the table of backends, and the choice from it; `limits` has the supported uses of each
backends/        the backends: torch is the oracle, triton runs our kernels, flashinfer and trtllm call FlashInfer's
recurrent/       states of recurrent layers, and their memory
kv_cache/        page allocator, prefix cache, KV layouts, and the memory of pages

How to add a backend: `docs/add-an-attention-backend.md`. KV layouts: `docs/kv-layout.md`.
"""
