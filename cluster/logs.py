"""Console output of Aerie's processes: marked lines of text, which `aerie serve` distinguishes from Ray's and Serve's,
or JSON objects with the request's id. Each process sets it up once.
"""

import contextvars
import json
import logging
import re
import sys
import time
from typing import Literal, TextIO

OURS = "aerie"  # the logger above all of ours
REQUEST_LOG = "aerie.requests"  # logger of one line a generation request, also in text
_FIELDS = "fields"
MARK = "aerie| "  # prefix of each line for the operator

REQUEST_ID = re.compile(r"[!-~]{1,128}")  # valid request ids of clients
# The client's id of the request in the current task; "" outside of requests.
request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")


class MarkedFormatter(logging.Formatter):
    """Formats log lines as `LEVEL PROCESS: message`, with the record's own fields (see `fields`) that are not empty.
    process: this process's name, such as "ingress"."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(levelname)s {process}: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        of_record: dict[str, object] = getattr(record, _FIELDS, {})
        more = " ".join(f"{name}={value}" for name, value in of_record.items() if value != "")
        return marked(super().format(record) + (more and f": {more}"))


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object: time (UTC, RFC 3339), level, logger, process, message, and if present
    request_id, the record's own fields (see `fields`) and the traceback. process: see `MarkedFormatter`."""

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
    """Return the argument `extra` of a log call, to add these fields to its JSON."""
    return {_FIELDS: values}


def marked(text: str) -> str:
    """Return `text` with a mark before each line."""
    return "\n".join(MARK + line for line in text.split("\n"))


def print_line(text: str) -> None:
    """Print marked lines to the console, even if Serve has redirected sys.stdout to its log file."""
    assert sys.__stdout__ is not None
    sys.__stdout__.write(marked(text) + "\n")
    sys.__stdout__.flush()


def use_logs(log_format: Literal["text", "json"], process: str, stream: TextIO | None = None) -> None:
    """Log JSON of level INFO and above, or marked lines of level WARNING and above, and those of `REQUEST_LOG`.

    stream: default: stderr, even if Serve has redirected it."""
    is_json = log_format == "json"
    handler = logging.StreamHandler(stream or sys.__stderr__)
    handler.setFormatter(JsonFormatter(process) if is_json else MarkedFormatter(process))
    logger = logging.getLogger(OURS)
    logger.handlers = [handler]
    logger.setLevel(logging.INFO if is_json else logging.WARNING)
    logger.propagate = False
    logging.getLogger(REQUEST_LOG).setLevel(logging.INFO)
