"""Work for the ranks between two steps: commands beside plans.

command          `Command`, the kinds of work, and `CommandAnswer`
command_queue    commands that wait until no step is in flight; sends one at a time
capture_pacing   decides when a serving engine captures another CUDA graph
draft_check      names a draft whose acceptance fell after an update of weights
weight_versions  updates of weights, and what new ranks need to get the same ones
"""
