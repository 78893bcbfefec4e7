"""One engine replica without Ray: requests become steps, steps become tokens. Knows no speculation and no HTTP.

scheduling         decides what each step runs: queues, pages, plans to the ranks and their results
runner             one rank: executes plans, captures graphs; also builds an engine, and runs one without transport
sampling           chooses the next token, on the device
structured_output  JSON schemas and grammars: the tokens that they allow next
slots              running requests on the device
models             target models, loaded from checkpoint folders
layers             the tensor-parallel layers that models are made of
vision             images of prompts: the processor's process, the vision tower
lora               adapters of models, chosen by request: files of peft, layers that add them
quantization       formats of quantised checkpoints: loading and matrix products
distributed        communication between the ranks of an engine
config, device, memory_use   configuration of an engine; its device and dtype; its memory use
request_values     declarations of numbers that requests may set
prompt_inputs      inputs of a prompt besides its token ids
timer              milliseconds of work on a device
interrupt          delays Ctrl-C to the end of a step

Rooms import downwards in this order: runner, lora, models, quantization, layers, distributed.
"""
