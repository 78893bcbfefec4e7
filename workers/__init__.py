"""One engine replica without Ray: requests become steps, steps become tokens. Knows no EAGLE and no HTTP.

`scheduler` (with `prefill`, `roster`, `reservation`): what each step runs. `plan`: what travels to the ranks and back.
`worker`: one rank; `decoding`: the strategy it runs and plain decoding; `slots`, `sampler`: state and choice of tokens
on the device; `cuda_graph`: rounds as graphs. `models`, `layers`, `weights`, `loading`, `tp`: tensor-parallel targets.
`local`: an engine without transport.
"""
