"""Structured output: JSON schemas, regular expressions and grammars that an answer must follow.

On a rank:

json_schema      rewrites JSON schemas for the compiler; refuses those that it cannot enforce completely; whether the
                 cases of oneOf exclude each other
schema_keywords  supported JSON schema keywords and the constraints on each; the targets of $ref
schema_patterns  patterns and lengths of strings in the compiler's form
compiler         compiles a grammar for a model's vocabulary
mask_table       grammar masks of a step: the allowed tokens of each row, on the device; writes the automata that
                 propose draft tokens under a grammar
slot_grammars    masks and guides of the requests in a rank's slots; makes all ranks agree on them; requests that wait
                 because another rank's mask was late
host_link        connection to the process that fills the rank's masks
mask_messages    messages on this connection; msgpack messages on a stream socket; errors of grammars
token_bytes      the bytes of each token; the HTTP API reads them too; the tokenizer in a model's folder; the same

`mask_process` has the modules of that process, and of processes that try grammars.
"""
