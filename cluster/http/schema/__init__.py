"""Types of requests and replies. Requests are validated with pydantic, replies encoded with msgspec.

body               reads and validates a body; the rule for unknown fields
request            requests to /v1/chat/completions and /v1/completions, and refused parameters
message            conversations, tools, tool_choice
response           replies of all routes except those below
completions        /v1/chat/completions and /v1/completions: documents and stream events
responses          /v1/responses: requests, documents and stream events
messages           /v1/messages
native             SGLang's /generate
"""
