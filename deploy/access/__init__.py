"""How commands reach a running Ray, and its token.

ray_token  where Ray's token is, and who makes one
reach      finds the Ray of a server or node on this machine; `aerie env`
"""
