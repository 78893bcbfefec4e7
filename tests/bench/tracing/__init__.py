"""Where the time of a first token goes, process by process (docs/first-token.md).

first_token   the bench: an open loop whose requests are traced
stamps        times at the functions that a request passes, in every process of an unchanged server
legs          the way between stamps, without gaps
"""
