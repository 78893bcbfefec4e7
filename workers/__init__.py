"""One engine replica without Ray: requests become steps, steps become tokens. Knows no speculation and no HTTP.

scheduling         what each step runs: queues, pages, the plan that travels to the ranks and the result that comes back
runner             one rank: a plan as tensors, a step of rounds and prompts, rounds as graphs; an engine assembled, and
                   run without transport
sampling           chooses the next token, on the device
structured_output  JSON schemas and grammars: the tokens that they allow next
slots              running requests on the device
models             targets: a checkpoint's folder to a module on this rank, by its architecture's family
layers             the tensor-parallel layers that models are made of
quantization       formats of quantised checkpoints: which layers have them, how they are loaded and multiplied
ops                the operations of all of these: contract, reference and kernels
span               a rank's share of rows, heads or experts
distributed        how the ranks of an engine talk
config, device, memory_use   what an engine is configured with; the device and type that follow; where memory went
interrupt          Ctrl-C, held back to the end of a step

Rooms import downwards in this order: runner, models, quantization, layers, distributed, ops.
"""
