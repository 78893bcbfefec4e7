"""`aerie chat`: a conversation in the terminal that shows how tokens come.

command       the command, and the loop: a line in, an answer out
conversation  what has been said and how answers are asked for; without a terminal
answer        one answer as it comes: its figures
"""
