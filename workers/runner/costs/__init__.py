"""Measures step times once, at the start.

cost_points     the steps that are measured
cost_probe      runs and times them
measured_table  the `CostTable` of these times
"""
