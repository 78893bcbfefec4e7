"""Every decoder that transformers knows and no family of ours does: its own modules, with our linear layers,
vocabulary and attention in their places.

survey     runs a model without memory and writes down its calls of attention
names      what checkpoints call the tensors of its modules
config     `AdapterConfig`, made of both; says why a model is not served
layers     puts our layers into the model
model      `TransformersModel`, the target that the runner calls
family     the row that `workers.models.registry` takes for every other architecture
"""
