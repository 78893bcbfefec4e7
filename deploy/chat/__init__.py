"""`aerie chat`: a conversation in the terminal that shows the origin of tokens.

command       the command, and the loop: a line in, an answer out
conversation  what has been said, how answers are asked for, one answer as it comes; without a terminal
"""
