"""What a step takes on this machine, measured once at the start.

cost_points  which steps are measured
cost_probe   measures them by replay
"""
