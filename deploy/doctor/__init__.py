"""`aerie doctor`: what a newcomer needs next on this machine.

report    the command: a line per finding
findings  what is right and wrong with a machine, with the remedy; pure
machine   reads what this machine has
"""
