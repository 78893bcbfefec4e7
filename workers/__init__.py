"""One engine replica without Ray: requests become steps, steps become tokens. Knows no EAGLE and no HTTP.

config       what an engine is told
scheduling   which requests run in a step, on which KV pages; the plan and the result of a step
runner       one rank that executes plans: slots, decoding strategies, CUDA graphs; an engine without transport
sampling     which token comes next, the same on every rank
models       targets, from a checkpoint's folder to a module
layers       the tensor-parallel layers they are made of
distributed  how ranks talk
device       which device a rank computes on, and in which type
"""
