"""Tensor-parallel layers for models. Each layer takes its shard from a whole tensor of the checkpoint. Layers know
ranks and attention backends, but neither model configurations nor steps.

linear           column- and row-parallel linear layers; `finish_weights`
linear_method    `LinearMethod`: stores, loads and multiplies a linear layer's weight
moe              the gated MLP, and mixture of experts; `experts_method` stores and multiplies the experts' weights
weighted         `WeightedModule`: the interface between a layer and the weight loader; `WeightMethod`
decoder_layer    the pre-norm block, and the interfaces of its attention and MLP
attention        grouped-query attention
latent_attention multi-head latent attention (MLA), absorbed
forward_context  the inputs that all layers of a pass share: positions, KV slots, attention batches
gated_delta_net  a recurrent layer in place of attention
rotary           rotary angles; RoPE settings in place of config.json's
norm             RMSNorm with the residual addition
vocab            embedding, logits and reductions over vocabulary shards
"""
