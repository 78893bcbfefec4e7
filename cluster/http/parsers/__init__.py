"""Splits answers into content, reasoning and tool calls, with a parser per format of answers.

output_parser      the interface of parsers, the parser of plain text, deltas of calls
families           what distinguishes the families of models, and how a chat template shows the family
table              makes the parser of an answer; a parser of marks in the text
marks              finds marks (`<think>`, `<tool_call>`) in streamed text
reasoning          thinking between two marks, and its number of tokens
tool_calls         tool calls between marks
json_calls         streamed calls in JSON
xml_calls          streamed calls in XML, for several families
literal_calls      calls in Python's and in Gemma's literals
argument_types     JSON types of a tool's arguments
harmony            gpt-oss's channels
response_template  templates that come with the checkpoint, read by transformers
call_grammar       tools and tool_choice as a constraint on the answer
"""
