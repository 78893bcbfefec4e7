"""What travels over HTTP, typed. Requests are checked with pydantic, replies encoded with msgspec.

request   what clients may send, and what is refused with a reason
response  what clients receive: documents and stream events
"""
