"""The one exception that says that a training cannot be done as asked."""


class TrainingError(ValueError):
    """What the user gave cannot be used. One line: the option or file, its value, what is wrong, and the remedy. The
    command line prints it and exits with status 2; any other exception is a fault of ours and keeps its traceback."""


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C has ended a training; the message says what is kept and how to go on."""
