"""Serves every decoder that transformers has and `workers.models` lacks: its own modules, with our linear layers,
vocabulary and attention in their places.

survey     runs a model on the meta device and records its attention calls
streams    what enters and leaves its layers, for drafts that read it
names      checkpoint names of the tensors of its modules
refusals   why a model is not served
config     `AdapterConfig`, made of these
siblings   finds linear layers with the same input
matching   finds modules that compute what our fused operations do
routers    finds routers of experts that choose as our operation does
layers     our layers: linear, embedding, attention
experts    our experts
fused      our layers that have fewer kernels than theirs: merged linear layers, gated MLPs
blocks     decoder layers whose residual addition is one launch with a norm
host_constants  keeps tensors that a model makes of numbers in each pass
replace    puts our layers into the model
ranks      tries a rank's share of a model on the meta device
model      `TransformersModel`, the target that the runner calls
family     the row that `workers.models.registry` takes for every other architecture
"""
