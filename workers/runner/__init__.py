"""One rank: plans in, results out.

worker          plan -> batch -> step -> result
plan_batch      a plan as a batch of tensors; chunk_tensors: its prompt chunks
batch           those tensors, and the layout of their rows
step_result     what a step emitted, as the scheduler reads it
decoding        `DecodingStrategy`, and plain decoding
graphs          any strategy's steps as CUDA graphs
costs           what a step takes, measured at the start
model_runner    a model, its KV pool and its attention backends: one forward pass
backends        which attention backend serves which mode
deterministic   what `deterministic: true` promises, and what cannot keep it
layout          what is known before anything is loaded, and what speculation adds
build           from configuration to a rank
memory          how a rank's memory is divided while it is built; device_memory: how much there is
executor        the interface of whoever sends plans
local_engine    an engine in this process, without transport; rank_processes: its ranks, if it has several
"""
