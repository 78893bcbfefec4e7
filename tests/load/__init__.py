"""Load and faults on one to four real Ray nodes: `make load`, or `python -m tests.load [--only NAME ...]`.

matrix     the scenarios, as data
gpu_matrix those whose nodes have GPUs, all of one machine: `--only gpu-across ...`, skipped where there are too few
scenario   what a scenario is made of: cluster, load, faults, expectations
sandbox    namespaces in which all of it runs, and which take every process with them when they end
network    nodes as network namespaces on a bridge
wire       a link that delays and loses frames
gpus       GPUs shared out to nodes, and a target whose texts depend on the request alone
cluster    Ray and `aerie serve` on those nodes, and their processes by what they are for
faults     how each fault is done
client     requests of an open loop with their texts checked, and /health over time
verdict    figures of a run, and which expectations it missed
report     timeline, plot, table

hostile    attacks on any server, with plain streams beside them
cpu_lent   the part of a gap that another process's use of the CPU explains
"""
