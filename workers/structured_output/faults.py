"""Why a grammar cannot be used. Imports nothing, so that processes without the compiler can name these errors."""


class InvalidGrammarError(ValueError):
    """The grammar cannot be compiled, or allows no text. The message is for the client."""


class VocabularyError(ValueError):
    """The model's tokenizer cannot write every text, so that a grammar could leave no token to choose."""
