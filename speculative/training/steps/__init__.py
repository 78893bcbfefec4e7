"""Parts of the optimisation loop.

graphed_step  steps replayed from CUDA graphs
time_limit    the end after a given time
"""
