"""KV memory and attention over it. Knows tensors and pages; no models, no requests, no Ray.

distribution     what Aerie is installed as, for remedies that name a package
config           what is configured: page size and memory, backends by name
metadata         the ragged shapes of a forward pass: requests in a round, prompt chunks
capability       what a device and the installed libraries can do; the only module that asks
to_device        copies from host memory for which nothing waits
lazy_import      objects that tables name, imported when they are chosen
ops/             operations over KV; `ops.operation` says what an operation is
views            what backends see of one layer's KV
rotation         rotary position embedding in torch
expansion        prompt chunks over latent rows whose keys and values are made again, and when that pays
backend          what an attention backend is
registry         the table of backends, the choice, refusals; `limits` says what each can serve
backends/        the backends: torch is the oracle, triton runs our kernels, flashinfer and trtllm call FlashInfer's
recurrent/       what recurrent layers keep of a request, and its memory
kv_cache/        who holds which page, which pages an earlier prompt left, how KV is kept, and its memory

How to add a backend: `docs/add-an-attention-backend.md`. How KV is kept: `docs/kv-layout.md`.
"""
