"""CUDA graphs of a rank's steps.

graph_keys          defines which steps are captured, and which graph a batch uses
capture_queue       the order of captures
cuda_graph          captures steps and replays them
step_capture        captures one step; wraps CUDA's capture
graph_inputs        the input tensors of a captured step
host_output         copies a step's output to the host
kernel_compilation  compiles kernels before they are captured
compile_jobs        the compilation of a kernel as a picklable job; processes that compile kernels
warm_up             the first steps of a rank, and the largest; chooses the graphs that a start captures, and compiles
                    their kernels ahead
"""
