"""One rank: plans in, results out.

worker          plan -> batch -> step -> result
plan_batch      converts a plan to tensors; chunk_tensors: its prompt chunks
batch           those tensors, and the layout of their rows
step_result     a step's output, as the scheduler reads it
decoding        `DecodingStrategy`, and non-speculative decoding
graphs          CUDA graphs of any strategy's steps
costs           measures step times at the start
model_runner    a model, its KV pool and its attention backends: one forward pass
backends        chooses the attention backend per mode
deterministic   what `deterministic: true` promises, and what it excludes
layout          what is known before anything is loaded, and what speculation adds
build           from configuration to a rank
memory          divides a rank's memory while it is built; device_memory: how much there is
executor        the interface to the sender of plans
local_engine    an engine in this process, without transport; rank_processes: its ranks, if it has several
"""
