"""A rank's steps as CUDA graphs.

cuda_graph     captures and replays the steps of any strategy
capture_queue  which step is captured next
step_capture   how one step becomes graphs
kernel_compilation  kernels compiled ahead of captures
compile_processes  processes that compile them; compile_jobs: what they are given
graph_keys     which steps have a graph
graph_inputs   what a captured step reads
emitted        what a step emitted, on its way to the host
recorder       how a step is recorded
warm_up        a rank's first steps
"""
