"""A decoder layer as one kernel.

host_layer  on CPUs, in C++
"""
