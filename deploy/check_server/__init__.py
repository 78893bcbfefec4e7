"""`aerie exact` and `aerie check-server`: black-box checks of any server with OpenAI's routes.

ask        sends requests and reads what a client can see of their answers
exact      the same tokens and log-probabilities alone, beside others, cached, with and without speculation
contract   identifiers copied under load, stop strings, streams, tool calls, usage
command    the two commands, and the page that they write
"""
