"""One rank: plans in, results out.

worker          turns plans into batches, runs the strategy's step, turns tensors into results
batch           a step's plan as tensors, and the layout of its rows; chunk_tensors: its prompt chunks
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
