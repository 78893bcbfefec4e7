"""Which of Ray's lines `aerie serve` does not print: those that alarm and ask nothing of the reader (Ray 2.60)."""

import logging

_TOKEN_LOGGER = "ray._private.authentication.authentication_token_setup"
_TOKEN_LINE = "Token authentication is enabled"


def leave_out_token_line() -> None:
    """A Ray of this machine has a token of its own by default. That is as it should be; that it has
    none, which is worth a warning, is printed."""
    logging.getLogger(_TOKEN_LOGGER).addFilter(lambda record: not record.getMessage().startswith(_TOKEN_LINE))


def leave_out_ends() -> None:
    """From here on print nothing of Ray's processes, because this one ends them: raylets would report each as lost."""
    from ray._private.ray_logging import global_worker_stdstream_dispatcher
    from ray._private.worker import global_worker

    global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")
    if global_worker.connected:
        global_worker.threads_stopped.set()  # of the threads that print, one of which waits for the next report:
        global_worker.gcs_error_subscriber.close()
