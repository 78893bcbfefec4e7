"""Converts text to tokens and back.

tokenizer        the model's tokenizer: text to tokens and back
model_files      reads the settings in the model's folder
chat_template    messages as a prompt's text; system messages in a form that the template shows
template_facts   what a template supports, found by rendering trial conversations; limits of a template's time and
                 output
harmony_prompt   the same for gpt-oss, in the harmony format, with schemas of tools as TypeScript
user_text        keeps control tokens in users' texts as plain text; texts that are too long to be encoded whole
json_text        JSON in strings
detokenizer      tokens to text, one at a time; ends an answer at stop strings
"""
