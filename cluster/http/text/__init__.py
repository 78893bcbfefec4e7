"""Between text and tokens.

tokenizer        the model's tokenizer: text to tokens and back
model_files      what the model's folder says of both
long_text        what is too long to be encoded as a whole
control_tokens   tokens that text from users must not become
chat_template    messages as a prompt's text
harmony_prompt   the same for gpt-oss, by the rules of its format
typescript       schemas of tools in it
template_limits  how long that may take, and become
user_text        which parts of it users wrote
json_text        JSON within strings
detokenizer      tokens to text, one at a time
stop_strings     where an answer's text ends
"""
