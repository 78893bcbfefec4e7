"""Converts text to tokens and back.

tokenizer        the model's tokenizer: text to tokens and back
model_files      reads the settings in the model's folder
long_text        texts that are too long to be encoded whole
control_tokens   control tokens, and their texts as plain text
chat_template    messages as a prompt's text
harmony_prompt   the same for gpt-oss, in the harmony format
typescript       schemas of tools in that format
template_limits  limits of a template's time and output
user_text        marks the users' parts of a rendered chat
json_text        JSON in strings
detokenizer      tokens to text, one at a time
stop_strings     ends an answer at stop strings
"""
