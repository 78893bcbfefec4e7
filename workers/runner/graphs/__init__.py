"""CUDA graphs of a rank's steps.

first_graphs        the graphs that a start captures, and their kernels compiled ahead
graph_keys          which steps are captured, and which graph a batch uses
capture_queue       the order of captures
cuda_graph          captures steps and replays them
step_capture        captures one step
recorder            wraps CUDA's capture
graph_inputs        the input tensors of a captured step
emitted             copies a step's output to the host
kernel_compilation  compiles kernels before they are captured
compile_processes   processes that compile kernels
compile_jobs        a kernel as a job for such a process
warm_up             the first steps of a rank
"""
