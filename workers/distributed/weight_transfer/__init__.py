"""Weights from a trainer's process to the ranks of engines, by collectives (docs/weight-updates.md).

wire        names, dtypes and shapes of announced tensors; the bytes of each broadcast
group       the group of a trainer (rank 0) and the ranks: rendezvous, broadcasts, time limits; gloo
nccl_group  the same by NCCL's C library, whose communicators trainers of vLLM can join
join        the group of a device
sender      the trainer's end
"""
