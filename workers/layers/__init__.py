"""The tensor-parallel layers that models are made of. Each cuts its own shard out of a full checkpoint tensor.

`linear`: column- and row-parallel products. `vocab`: embedding and logits over vocabulary shards. `rotary`, `norm`.
`attention`: q, k, v of one layer against a `ForwardContext`. `decoder_layer`: the Llama block.
"""
