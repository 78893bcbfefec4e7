"""Operations over KV and attention's rows. Modules named *_triton hold kernels and need Triton; the others import
on every machine.

operation                      defines operations
contracts                      checks that several operations share
pdl                            programmatic dependent launch: the rule, and what each kernel reads before it waits
cuda_source                    compiles, loads and launches kernels in CUDA C++
interpreter_triton             whether Triton's interpreter runs the kernels
rope_store                     norms per head, RoPE of q and k, and the write of k and v to their pages
rope_store_normed_triton       its kernel for layers with norms per head
rope_store_triton              its kernel for other layers
nan_values                     keeps NaN out of stored values
nan_values_triton              the same in kernels
rms_norm_triton                the formula of RMSNorm, for kernels
slot_mapping                   KV positions of a pass's rows, and the token indices that they write
move_path                      moves the KV of an accepted path to the front of its tree
flashinfer_plan_triton         plans FlashInfer's kernels for a round, on the device
flashinfer_latent_plan_triton  plans FlashInfer's MLA kernel for a round, on the device
attend/                        attention over paged KV
delta_rule/                    recurrent layers of the gated delta rule
"""
