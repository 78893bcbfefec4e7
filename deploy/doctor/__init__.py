"""`aerie doctor`: checks this machine for new users.

findings  the command: faults of a machine and a configuration, with remedies
machine   reads the properties of this machine
"""
