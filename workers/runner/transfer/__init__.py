"""Weights that a trainer sends while steps run (docs/weight-updates.md).

session         the handler of a transfer's commands on one rank: joins, receives in a thread
checksums       checksums of the running weights
receive_memory  memory of received tensors, kept between sessions
staging         received tensors of a session, checked, beside the running weights
"""
