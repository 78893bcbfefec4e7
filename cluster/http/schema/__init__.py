"""What travels over HTTP, typed. Requests are checked with pydantic, replies encoded with msgspec.

body               how bodies are read; the rule for unknown fields
request            what clients may send, and what is refused with a reason
message            a conversation, tools, which tool to call
responses_request  to /v1/responses
messages_request   to /v1/messages
native_request     to SGLang's /generate
response           what clients receive, of all routes but those below
chat_reply         of /v1/chat/completions: documents and stream events
text_reply         of /v1/completions
responses_reply    of /v1/responses
messages_reply     of /v1/messages
native_reply       of SGLang's /generate
"""
