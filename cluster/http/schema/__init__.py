"""What travels over HTTP, typed. Requests are checked with pydantic, replies encoded with msgspec.

request     what clients may send, and what is refused with a reason
message     a conversation, tools, which tool to call
response    what clients receive, of all routes but the two below
chat_reply  of /v1/chat/completions: documents and stream events
text_reply  of /v1/completions
"""
