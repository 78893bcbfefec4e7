"""Between text and tokens.

tokenizer      the model's tokenizer: text to tokens and back
chat_template  messages as a prompt's text
detokenizer    tokens to text, one at a time
stop_strings   where an answer's text ends
"""
