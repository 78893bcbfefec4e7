"""Types of requests and replies. Requests are validated with pydantic, replies encoded with msgspec.

body               reads and validates a body; the rule for unknown fields
request            requests to /v1/chat/completions and /v1/completions, and refused parameters
message            conversations, tools, tool_choice
responses_request  requests to /v1/responses
messages_request   requests to /v1/messages
native_request     requests to SGLang's /generate
response           replies of all routes except those below
chat_reply         /v1/chat/completions: documents and stream events
text_reply         /v1/completions
responses_reply    /v1/responses
messages_reply     /v1/messages
native_reply       SGLang's /generate
"""
