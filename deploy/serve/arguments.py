"""The arguments of `aerie serve`, which `aerie plan` takes too. Imports nothing heavy."""

import argparse
import re
from pathlib import Path

from aerie.deploy.config import vllm_options


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `aerie serve`."""
    parser.add_argument(
        "config",
        nargs="?",
        default=None,
        metavar="MODEL|CONFIG",
        help="folder, GGUF file or OWNER/NAME of a model, a config file, or a packaged one's name (default: smollm2)",
    )
    parser.add_argument("--model", "--model-path", help="the same, as vLLM's and SGLang's modules have it")
    parser.add_argument(
        "--config",
        dest="options_file",
        metavar="FILE",
        help="options from a YAML file, as vLLM's and SGLang's --config",
    )
    parser.add_argument("--host", help="of HTTP, instead of the file's; 0.0.0.0 for all interfaces")
    parser.add_argument("--port", type=port_number, help="of HTTP, instead of the file's")
    parser.add_argument(
        "--route-prefix", type=path_prefix, help="path of the application, instead of the file's: /chat"
    )
    parser.add_argument(
        "--root-path", "--fastapi-root-path", type=path_prefix, help="path that a proxy before the server strips"
    )
    parser.add_argument("--verbose", action="store_true", help="print what Ray and Serve write, too")
    parser.add_argument("--address", help="of a running Ray cluster; without it Ray starts here, and small")
    parser.add_argument("--name", help="of the application, instead of the file's (default: aerie)")
    parser.add_argument("--replace", action="store_true", help="with --address: replace an application of this name")
    parser.add_argument("--object-store-mb", type=int, default=150, help="of a Ray started here (default: 150)")
    parser.add_argument("--no-haproxy", action="store_true", help="use Serve's Python proxy in any case")
    _add_model(parser)


EXAMPLES = """examples:
  aerie serve                                                   the embedded pair, on any machine
  aerie serve OWNER/NAME -tp 2 --max-model-len 32k              as vllm serve
  aerie serve --model-path OWNER/NAME --tp 2 --draft HEAD       as SGLang's server
  aerie serve serve.yaml                                        a config file; `aerie config` prints one
Options of vLLM and SGLang that are not listed are taken without effect, or refused with a remedy:
docs/coming-from-vllm.md. Options that name a key, such as cache.page_size: `aerie config --keys cache` explains it.
`aerie plan` with the same arguments starts nothing and prints the configuration."""
USAGE = "%(prog)s [MODEL|CONFIG] [options]"


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options that replace a Serve config file, which `aerie.deploy.config.model` reads."""
    options = parser.add_argument_group("with a model instead of a config file")
    options.add_argument(
        "--draft",
        metavar="HEAD",
        help="EAGLE or DFlash head: folder or name on the hub; or suffix: copy from the request's own text",
    )
    options.add_argument("--revision", help="of the model on the hub: branch, tag or commit")
    options.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any key of docs/configuration.md, such as cache.memory_gb=4; can be repeated",
    )
    options.add_argument("--save", type=Path, metavar="FILE", help="keep the config file that this amounts to")
    vllm_options.add_options(parser)


def path_prefix(text: str) -> str:
    """Parse the path that routes are below. "/" stays; any other loses a slash at its end."""
    if not re.fullmatch(r"/[\w.~/-]*", text) or "//" in text:
        raise argparse.ArgumentTypeError(f"{text}: must be a path with a slash before it, such as /chat")
    return text.rstrip("/") or "/"


def port_number(text: str) -> int:
    """Parse a TCP port."""
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise argparse.ArgumentTypeError(f"{text}: must be a number from 1 to 65535, such as 8000")
    return int(text)
