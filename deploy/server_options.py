"""Options of the commands that talk to a server, which `deploy.client` reads. Imports nothing heavy."""

import argparse

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "AERIE_API_KEY"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a server, its key and model."""
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, help=f"of the server (default: {DEFAULT_URL})")
    parser.add_argument("--key", default="", help=f"API key (default: ${KEY_VARIABLE})")
    parser.add_argument("--model", default="", help="its name, where the server has several")
