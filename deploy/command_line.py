"""Parses and runs a command of `aerie`: spellings that argparse does not know, advice on unknown options, and errors of
the user as one line and an exit code."""

import argparse
import difflib
import errno
import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from aerie.cluster.config import ConfigError
from aerie.cluster.start_log import process_began_s
from aerie.deploy.config.keys import with_file
from aerie.deploy.config.vllm_options import is_flag
from aerie.deploy.config.vllm_values import OptionError
from aerie.deploy.processes.guard import run_guarded
from aerie.kernels.lazy_import import load
from aerie.speculative.training import TrainingError

DEFAULT_CONFIG = "eagle"
_DOTTED = re.compile(r"(--?[a-zA-Z][\w-]*)\.([\w.+-]+)")  # vLLM's part of an option that is a JSON object
_LEVEL = re.compile(r"-O\.?=?(\d)")  # vLLM's -O3
_NO_CHOICE = re.compile(r"invalid choice: '([\w-]+)' \(choose from (.*)\)")  # argparse's own words
_TRUE, _FALSE = ("true",), ("false",)


class Parser(argparse.ArgumentParser):
    """Takes no beginnings of options, and names the nearest option for an unknown one."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False} | options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and refuse unknown options here, where this command's options are known."""
        parsed, others = super().parse_known_args(args, namespace)
        unknown = [word for word in others if word.startswith("-")]
        if unknown and self._subparsers is None:
            self.error("; ".join(self._unknown(word.partition("=")[0]) for word in unknown))
        return parsed, others

    def _unknown(self, name: str) -> str:
        """Return the message for an unknown option, with the most similar known one."""
        known = [option for option in self._option_string_actions if len(option) > 2]
        near = difflib.get_close_matches(name, known, 1, 0.7)
        begins = sorted((option for option in known if option.startswith(name) and len(name) > 4), key=len)
        meant = begins[0] if begins else near[0] if near else ""
        hint = f"did you mean {meant}?" if meant else f"`{self.prog} --help` and docs/coming-from-vllm.md have them all"
        return f"{name}: unknown option; {hint}"

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with 2. For a command that does not exist, it names the nearest one."""
        if match := _NO_CHOICE.search(message):
            near = difflib.get_close_matches(match[1], re.findall(r"[\w-]+", match[2]), 1)
            message += f"; did you mean {near[0]}?" if near else ""
        self.exit(2, f"{self.prog}: {message}\n")


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Return the parsed command line. `--model NAME` of `serve` and `plan` becomes the config argument."""
    takes_options = arguments[:1] in (["serve"], ["plan"])
    try:
        words = [arguments[0], *normalised(with_file(arguments[1:]))] if takes_options else arguments
    except OptionError as error:
        parser.error(str(error))
    options = parser.parse_args(words)
    if takes_options and options.model is not None:
        if options.config not in (None, options.model):
            parser.error(f"--model {options.model}: the model is {options.config} already; give it once")
        options.config = options.model
    if takes_options and options.config == "":
        parser.error("the model's name is empty (an unset variable?); leave it out for the default model")
    return options


def normalised(arguments: Sequence[str]) -> list[str]:
    """Return a command line with underscores in names of options as dashes, `--flag=false` as `--no-flag`, and
    `--option.part value` as one JSON object for each option."""
    objects: dict[str, dict[str, Any]] = {}
    plain: list[str] = []
    left = iter(arguments)
    for argument in left:
        name, equals, value = argument.partition("=")
        if level := _LEVEL.fullmatch(argument):
            plain += ["--optimization-level", level[1]]
        elif match := _DOTTED.fullmatch(name):
            text = value if equals else next(left, "")
            _put(objects.setdefault(_dashed(match[1]), {}), match[2].split("."), text)
        elif not name.startswith("-"):
            if argument.lower() in _TRUE + _FALSE and plain and is_flag(plain[-1]):
                plain[-1] = _flag(plain[-1], argument)
            else:
                plain.append(argument)
        elif is_flag(_dashed(name)) and value.lower() in _TRUE + _FALSE:
            plain.append(_flag(_dashed(name), value))
        else:
            plain.append(_dashed(name) + equals + value)
    return list(_with_objects(plain, objects))


def _with_objects(arguments: Sequence[str], objects: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the arguments, then each option that was given in parts; what was given whole is part of the object."""
    left = iter(arguments)
    for argument in left:
        name, equals, value = argument.partition("=")
        if name not in objects:
            yield argument
            continue
        try:
            objects[name] = json.loads(value if equals else next(left, "")) | objects[name]
        except (ValueError, TypeError):
            yield argument  # argparse and the option's own check say what is wrong
    for name, parts in objects.items():
        yield from (name, json.dumps(parts))


def _put(parts: dict[str, Any], path: Sequence[str], text: str) -> None:
    """Set a value in nested objects: JSON, else text. A name that ends with + adds to a list."""
    *sections, last = path
    for section in sections:
        parts = parts.setdefault(section, {})
    try:
        value = json.loads(text)
    except ValueError:
        value = {"True": True, "False": False, "None": None}.get(text, text)
    if last.endswith("+"):
        parts.setdefault(last[:-1], []).append(value)
    else:
        parts[last] = value


def _dashed(name: str) -> str:
    return name.replace("_", "-") if name.startswith("--") else name


def _flag(name: str, value: str) -> str:
    if value.lower() in _TRUE:
        return name
    return f"--{name.removeprefix('--no-')}" if name.startswith("--no-") else f"--no-{name.removeprefix('--')}"


def run_guarded_command(arguments: argparse.Namespace) -> int:
    """Run `aerie serve` under the guard process."""
    began_s = process_began_s()
    return run_guarded(lambda ends_by_itself: run_command(arguments, began_s, ends_by_itself))


def run_command(arguments: argparse.Namespace, *more: object) -> int:
    """Run the parsed command. more: further arguments of its function."""
    try:
        code: int = load(arguments.run)(arguments, *more)
    except (ConfigError, TrainingError) as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader ended, as in `aerie ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes its buffer there at exit
        return 128 + signal.SIGPIPE
    except OSError as error:
        # ENOENT without a file name: tempfile has found no temporary folder
        if error.errno not in _FOLDER_ERRORS and (error.errno != errno.ENOENT or error.filename):
            raise
        print(_folder_fault(error), file=sys.stderr)
        return 2
    except MemoryError as error:
        remedy = "free memory, or raise the limit (ulimit -v, a container's memory)"
        print(f"aerie: not enough memory{f' ({error})' if str(error) else ''}: {remedy}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print(str(error) or "aerie: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return code


# Errors of the file system: a full disk, a read-only folder, too many open files.
_FOLDER_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOTDIR, errno.EMFILE, errno.ENFILE)


def _folder_fault(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else "TMPDIR, HOME or the output: "
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"aerie: {where}{error.strerror}: raise the limit of open files (ulimit -n)"
    remedy = "free some space, or set TMPDIR, HOME or the option that names it to a place that can be written"
    return f"aerie: {where}{error.strerror}: {remedy}"
