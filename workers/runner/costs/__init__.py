"""Measures step times once, at the start.

cost_points     the steps to measure
cost_probe      runs and times them
measured_table  builds a `CostTable` from the times
"""
