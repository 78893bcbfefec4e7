"""What steps take now: the measured table, corrected by every step that ran.

step         the work of a step, and its predicted time
parts        the parts of the logarithm of a step's time: of all steps, of a shape, of a batch size, of a chunk
part_filter  a Kalman filter over these parts
step_time    predicts steps, and decides what each finished step teaches the filter
"""
