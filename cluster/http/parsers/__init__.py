"""Splits answers into content, reasoning and tool calls: a parser for each form that models answer in.

output_parser      what a parser is, and that of plain text: the seam
table              which parser a name means
detection          which parser a model needs, by its chat template
marks              marks in text that comes in pieces
marked             a parser of marks in the text: reasoning first, then content and tool calls
reasoning          thinking between two marks
reasoning_tokens   how many tokens are reasoning
tool_calls         tool calls between marks, as each family of models writes them
json_calls         calls in JSON, read as they come
xml_calls          calls in XML of several families, read as they come
literal_calls      calls in Python's and in Gemma's literals
argument_types     which arguments of a tool are text, and which JSON
harmony            gpt-oss's channels
response_template  templates that come with the checkpoint, read by transformers
call_grammar       tools and tool_choice as a constraint on the answer
"""
