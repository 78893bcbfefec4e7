"""Current times of steps: the measured table, corrected by every step that ran.

step         the work of a step, and its predicted time
parts        the terms of the logarithm of a step's time: for all steps, a shape, a batch size, a chunk
part_filter  a Kalman filter over these parts
step_time    predicts steps, and updates the filter by each finished step
"""
