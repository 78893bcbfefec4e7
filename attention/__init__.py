"""KV memory and attention over it. Knows tensors and pages; no models, no requests, no Ray.

distribution     name of the installed distribution, for remedies that name a package
config           configuration: page size and memory, backends by name
metadata         the batches of a forward pass: rounds and prompt chunks
capability       abilities of a device and the installed libraries; no other module tests for them
to_device        asynchronous copies from host memory
lazy_import      objects that tables name, imported when they are chosen
ops/             operations over KV; `ops.operation` defines operations
views            one layer's KV, as backends get it
head_norms       norms per head, before rotary position embedding
rotation         rotary position embedding: the angles of rows, and the rotation in torch
expansion        prompt chunks over latent rows with expanded keys and values, and when that pays
backend          the interface of attention backends
registry         the table of backends, and the choice from it; `limits` has the supported uses of each
backends/        the backends: torch is the oracle, triton runs our kernels, flashinfer and trtllm call FlashInfer's
recurrent/       states of recurrent layers, and their memory
kv_cache/        page allocator, prefix cache, KV layouts, and the memory of pages

How to add a backend: `docs/add-an-attention-backend.md`. KV layouts: `docs/kv-layout.md`.
"""
