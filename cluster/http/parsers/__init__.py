"""Splits answers into content, reasoning and tool calls, with a parser per format of answers.

output_parser      the interface of parsers, the parser of plain text, deltas of calls; cuts text at marks, for a
                   parser of your own
families           what distinguishes the families of models, and how a chat template shows the family
table              makes the parser of an answer; a parser of marks in the text; templates that come with the
                   checkpoint, read by transformers
source             streamed text, how readers wait for more of it, and marks (`<think>`, `<tool_call>`) in it
reasoning          thinking between two marks, and its number of tokens
tool_calls         tool calls between marks; JSON types of a tool's arguments
json_copy          streamed JSON, repaired
json_calls         streamed calls in JSON
self_check         tries a chat template and its parser together at the start
xml_calls          streamed calls in XML, for several families
literal_calls      calls in Python's and in Gemma's literals; Python's literals as JSON
harmony            gpt-oss's channels
"""
