"""Measures step times once, at the start.

cost_points     the steps to measure; builds a `CostTable` from the times
cost_probe      runs and times them
"""
