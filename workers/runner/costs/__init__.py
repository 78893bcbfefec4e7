"""What a step takes on this machine, measured once at the start.

cost_points     the steps that are measured
cost_probe      measures them by replay
measured_table  the table that their times make
"""
