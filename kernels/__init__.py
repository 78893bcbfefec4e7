"""Operations and their kernels: the ground floor, which imports nothing else of Aerie, reads no environment and knows
no Ray. A module has an operation's contract and its reference in torch; kernels are in modules named *_triton,
*_cuda or *_cpp, which need their library; all others import on every machine.

capability          abilities of a device and the installed libraries; no other module tests for them
operation           defines operations
contracts           checks that several operations share
lazy_import         objects that tables name, imported when they are chosen
pdl                 programmatic dependent launch: the rule, and what each kernel reads before it waits
cuda_source         compiles, loads and launches kernels in CUDA C++; device.cuh: device functions that they share
cpp_library         compiles and loads the kernels for CPUs in cpp/, in C++
interpreter_triton  whether Triton's interpreter runs the kernels
to_device           asynchronous copies from host memory
score_order_triton  sort keys of scores and their places, in kernels
host_layer          a decoder layer as one kernel for CPUs
span                a rank's share of rows, heads or experts

kv           paged KV: the batches of a pass, a layer's pages, FP8 rows, which positions rows write
rope         rotary position embedding, and the write of rotated keys and values to their pages
norm         RMSNorm, activations and gates of single rows
gemm         y = x W^T for weights of 16 and 32 bits
fp8          FP8 rows and weights
experts      mixture of experts
packed       weights of 4 and 8 bits
attend       attention over paged KV
latent       multi-head latent attention, except attention itself
delta_rule   recurrent layers of the gated delta rule
lora         adapters of linear layers, by row
vocabulary   the logits of a vocabulary shard
sampling     from a step's logits to its tokens
slots        commits tokens to the rows of running requests
tree         draft trees: nodes, growth, acceptance
drafting     drafts copied from a request's text, drafts under grammars, heads of block drafts
collectives  between the GPUs of one node

How to add one: `docs/add-an-operation.md`. `python -m aerie.kernels` prints which implementations run here.
"""
