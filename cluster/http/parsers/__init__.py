"""Splits answers into content, reasoning and tool calls, with a parser per format of answers.

output_parser      the interface of parsers, the parser of plain text, deltas of calls
families           what distinguishes the families of models, and how a chat template shows the family
table              makes the parser of an answer; a parser of marks in the text
source             streamed text, how readers wait for more of it, and marks (`<think>`, `<tool_call>`) in it
marks              cuts text at marks, for a parser of your own
reasoning          thinking between two marks, and its number of tokens
tool_calls         tool calls between marks
json_copy          streamed JSON, repaired
json_calls         streamed calls in JSON
self_check         tries a chat template and its parser together at the start
xml_calls          streamed calls in XML, for several families
literal_calls      calls in Python's and in Gemma's literals
python_literals    Python's literals as JSON
argument_types     JSON types of a tool's arguments
harmony            gpt-oss's channels
response_template  templates that come with the checkpoint, read by transformers
call_grammar       tools and tool_choice as a constraint on the answer
"""
