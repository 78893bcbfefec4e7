"""Errors of grammars. Imports nothing, for processes without the compiler."""


class InvalidGrammarError(ValueError):
    """The grammar cannot be compiled, or allows no text. The message is for the client."""


class VocabularyError(ValueError):
    """The model has no tokenizer, so there are no texts to compare with a grammar."""
