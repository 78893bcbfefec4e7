"""Steps of the optimisation.

graphed_step  replayed from CUDA graphs
time_limit    until a given time has passed
"""
