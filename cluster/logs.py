"""Log lines as JSON objects, one a line on stderr, each with the request that it belongs to. Set up once in each
process if `log_format` says json; else Python's own handling stays.
"""

import contextvars
import json
import logging
import sys
import time
from typing import TextIO

OURS = ("attention", "workers", "speculative", "cluster", "deploy")  # whose loggers are set up
_FIELDS = "fields"

# The client's name of the request that the current task carries out; "" outside of one.
request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")


class JsonFormatter(logging.Formatter):
    """One JSON object a record: time (UTC, RFC 3339), level, logger, process, message; request_id, the record's own
    fields (see `fields`) and the traceback where there are any. process: what this process is, for the reader."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        whole, part = divmod(record.created, 1)
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{int(part * 1000):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
        }
        if request := request_id.get():
            line["request_id"] = request
        line |= getattr(record, _FIELDS, {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def fields(**values: object) -> dict[str, object]:
    """The argument `extra` of a log call whose line shall have these fields too, in JSON."""
    return {_FIELDS: values}


def use_json_logs(process: str, stream: TextIO | None = None) -> None:
    """From now on this process's lines of level INFO and above are JSON. stream: default stderr."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(process))
    for name in OURS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False
