"""`aerie chat`: a conversation in the terminal that shows the origin of tokens.

command       the command: reads lines, shows answers
conversation  the history, the requests and streamed answers; independent of the terminal
"""
