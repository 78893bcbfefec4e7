"""Work for the ranks between two steps: commands beside plans.

command          `Command`, the kinds of work, and `CommandAnswer`
command_queue    commands that wait until no step is in flight; sends one at a time; names a draft whose acceptance
                 fell after an update of weights; updates of weights, and what new ranks need to get the same ones;
                 decides when a serving engine captures another CUDA graph
"""
