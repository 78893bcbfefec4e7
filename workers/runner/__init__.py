"""One rank: assembled, and run step by step.

layout: what is known before loading, and how speculation takes part.
build, backends, warm_up: assembly of a rank.
worker, executor: plans in, results out.
batch: a plan as tensors.
decoding: `DecodingStrategy` and plain decoding.
model_runner: one pass of a model.
slot_table: what a request is on the device.
cuda_graph: rounds as graphs.
deterministic: what `deterministic: true` refuses.
local_engine, rank_processes: an engine without a cluster.
"""
