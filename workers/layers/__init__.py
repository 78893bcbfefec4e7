"""The tensor-parallel layers that models are made of. Each cuts its own share out of a whole tensor of the checkpoint.
The room knows ranks and attention backends, but neither models' configurations nor steps.

linear           column- and row-parallel linear layers; `finish_weights`, which makes loaded layers ready to run
linear_method    `LinearMethod`: how a linear layer keeps, loads and multiplies by its weight
moe              a mixture of experts: `routing` says who is chosen, `experts` keeps and multiplies them
weighted         `WeightedModule`: what the loader of weights knows of any layer
decoder_layer    the pre-norm block, and the interfaces of its attention and its MLP
attention, mlp   grouped-query attention over a `ForwardContext`; the gated MLP
latent_attention multi-head latent attention, absorbed
forward_context  what the layers of one pass may see: positions, where KV goes, which rows attend to what
rotary, norm     rotary angles; RMSNorm, with the residual's addition
vocab            embedding, logits and reductions over vocabulary shards
"""
