"""One rank: takes step plans, returns step results.

worker          plan -> batch -> step -> result; converts a step's output to a `StepResult`
plan_batch      converts a plan to tensors; chunk_tensors: converts its prompt chunks
batch           a step's tensors and the order of their rows
decoding        `DecodingStrategy`, and non-speculative decoding
graphs          CUDA graphs of any strategy's steps
costs           measures step times at the start
model_runner    one forward pass of a model with its KV pool and attention backends
backends        chooses the attention backend per mode
deterministic   what `deterministic: true` guarantees and excludes
layout          `EnginePlan`, computed before weights are loaded; `Speculation`, what a draft adds
build           builds a rank from a configuration
memory          divides a rank's memory; device_memory: measures it
weight_update   loads weights of running models again; transfer: receives them from a trainer, beside steps
rank_adapters   a rank's LoRA adapters, in host memory and in the layers' tables
routed_experts  the experts that routers chose for each token, stored in pages
executor        the interface of a rank to the sender of plans
local_engine    an engine without transport, for tests, benchmarks and offline use; rank_processes: its child processes
"""
