"""Where time goes: of a first token, process by process (docs/first-token.md); of a round on several ranks.

first_token   the bench: an open loop whose requests are traced
stamps        times at the functions that a request passes, in every process of an unchanged server
legs          the way between stamps, without gaps
rank_zero     an engine whose rank 0 runs in the profiler's process
"""
