"""Serves decoders of transformers for which `aerie.workers.models` has no class: their own modules, with Aerie's linear
layers, vocabulary and attention put in.

survey     runs a model on the meta device and records its attention calls
streams    captures inputs and outputs of layers, for drafts that read them
names      checkpoint names of the tensors of its modules; finds linear layers with the same input; reasons why a
           model is not supported
config     `AdapterConfig`, built from these
matching   finds modules that compute the same as our fused operations
routers    finds routers that choose experts like our operation; our experts
layers     our layers: linear, embedding, attention
host_constants  caches tensors that a model creates from numbers in each pass
replace    puts our layers into the model; merged linear layers and gated MLPs, which have fewer kernels
ranks      tries a rank's share of a model on the meta device
model      `TransformersModel`, the target that the runner calls; decoder layers with residual addition and norm in
           one launch
"""
