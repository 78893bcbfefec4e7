"""`aerie doctor`: checks this machine for new users.

report    the command: a line per finding
findings  faults of a machine, with remedies; pure
machine   reads the properties of this machine
"""
