"""The arguments of every command of `aerie`, and the name of its function, which is imported after parsing."""

from __future__ import annotations

import argparse
from pathlib import Path

from aerie.attention.distribution import version
from aerie.deploy.command_line import DEFAULT_CONFIG, Parser
from aerie.deploy.quantize.names import SCHEMES
from aerie.deploy.serve.arguments import EXAMPLES, USAGE, add_serve, port_number
from aerie.deploy.train_draft import add_command as add_train_draft
from aerie.deploy.train_draft import at_least

DEFAULT_VOCAB = 16000  # default bound on token ids of `aerie bench`; special tokens of most models are above
DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "AERIE_API_KEY"
SERVE = "aerie.deploy.serve.launch:run"


def parser() -> argparse.ArgumentParser:
    """Return the parser of `aerie`. A command sets `run` to "module:function": the function takes the parsed arguments
    and returns the exit code."""
    description = "Serves large language models from a Ray cluster."
    parser: argparse.ArgumentParser = Parser(prog="aerie", description=description)
    parser.add_argument("--version", action=_Version, nargs=0, help="print Aerie's version")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a model, or a Serve config file",
        usage=USAGE,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_serve(serve)
    serve.set_defaults(run=SERVE, shows_config=False)
    _add_start(commands)
    stop = commands.add_parser("stop", help="end what `aerie serve` and `aerie start` have started here, nothing else")
    stop.add_argument("--port", type=int, help="of HTTP, or of the cluster's head (default: every one)")
    stop.add_argument("--now", action="store_true", help="do not wait for running requests")
    stop.set_defaults(run="aerie.deploy.stop:run")
    _add_status(commands)
    plan = commands.add_parser(
        "plan", help="check what `serve` with these arguments would start, and print it", usage=USAGE
    )
    add_serve(plan)
    plan.add_argument("--nodes", type=int, default=1, help="nodes to plan for, 0: only check (default: 1)")
    plan.add_argument("--gpus", type=float, help="GPUs of each (default: this machine's)")
    plan.add_argument("--cpus", type=float, help="CPUs of each (default: this machine's)")
    plan.set_defaults(run="aerie.deploy.checks:run", shows_config=True)
    doctor = commands.add_parser("doctor", help="what is needed next on this machine, a line per finding")
    _add_config(doctor)
    bundle = "also write versions, configuration, plan, status and recent logs, without secrets, into this .tar.gz"
    doctor.add_argument("--bundle", type=Path, metavar="FILE", help=bundle)
    doctor.set_defaults(run="aerie.deploy.doctor.findings:run")
    config = commands.add_parser("config", help="print a packaged config file to start from, or the keys of any")
    config.add_argument("name", nargs="?", default=DEFAULT_CONFIG, help=f"default: {DEFAULT_CONFIG}")
    keys = "print keys with defaults and meanings instead, of these sections (default: all)"
    config.add_argument("--keys", nargs="*", metavar="SECTION", help=keys)
    config.set_defaults(run="aerie.deploy.config.files:run")
    add_train_draft(commands)
    _add_quantize(commands)
    _add_token_map(commands)
    _add_tekken(commands)
    _add_eval_draft(commands)
    _add_bench(commands)
    _add_check_cache(commands)
    _add_exact(commands)
    _add_chat(commands)
    return parser


class _Version(argparse.Action):
    """Prints the version, which is looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"aerie {version()}")
        parser.exit()


def _add_start(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    start = commands.add_parser("start", help="make this host a Ray cluster's head, or join one; see docs/clusters.md")
    role = start.add_mutually_exclusive_group(required=True)
    role.add_argument("--head", action="store_true", help="be the head")
    role.add_argument("--address", default="", help="join the cluster of this head, HOST:PORT")
    start.add_argument("--port", type=port_number, default=6379, help="of the head (default: 6379)")
    start.add_argument(
        "--node-ip", default="", help="address of this host by which others reach it (default: Ray's choice)"
    )
    start.add_argument("--interface", default="", help="instead of --node-ip, the network interface, as eth0")
    start.add_argument("--num-cpus", type=int, help="for Ray to place on (default: the host's)")
    start.add_argument("--num-gpus", type=int, help="for Ray to place on (default: the host's)")
    start.add_argument("--object-store-mb", type=int, default=150, help="of Ray's shared memory (default: 150)")
    start.add_argument("--block", action="store_true", help="stay in the foreground, as a supervisor wants it")
    start.set_defaults(run="aerie.deploy.start:run")


def _add_status(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    status = commands.add_parser("status", help="applications, engines and what waits for room, without a dashboard")
    status.add_argument("--json", action="store_true", help="print one JSON object")
    status.add_argument("--name", help="only of the application of this name")
    status.set_defaults(run="aerie.deploy.status.command:run")
    env = commands.add_parser(
        "env",
        help="print the variables by which commands of Ray and Serve reach a server's Ray",
        description='For a shell: eval "$(aerie env)", then for instance `ray status`.',
    )
    env.set_defaults(run="aerie.deploy.access:run_env")
    for parser in (status, env):
        parser.add_argument("--port", type=int, help="of HTTP, or of the cluster's head, if several run here")
        parser.add_argument("--address", help="of another Ray, HOST:PORT (default: the one here, or RAY_ADDRESS)")


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        nargs="?",
        default=DEFAULT_CONFIG,
        help=f"file, or where there is none, a packaged one's name (default: {DEFAULT_CONFIG}, the embedded pair)",
    )


def _add_server(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a server, its key and model, which `aerie.deploy.client` reads."""
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, help=f"of the server (default: {DEFAULT_URL})")
    parser.add_argument("--key", default="", help=f"API key (default: ${KEY_VARIABLE})")
    parser.add_argument("--model", default="", help="its name, where the server has several")


def _add_quantize(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    schemes = ", ".join(f"{name}: {preset.says}" for name, preset in SCHEMES.items())
    parser = commands.add_parser(
        "quantize",
        help="make a checkpoint of fewer bits",
        description="Writes a checkpoint of fewer bits in a format of compressed-tensors, which Aerie, vLLM and "
        "transformers read, and prints its size and its loss on text beside the original's. Weights pass one matrix at "
        "a time, so a checkpoint may be larger than memory; loss and calibration need the model in memory.",
    )
    parser.add_argument("model", help="folder of a checkpoint of 16 or 32 bits, or OWNER/NAME on the hub")
    parser.add_argument("--scheme", required=True, choices=list(SCHEMES), help=schemes)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="for the new checkpoint")
    chosen = parser.add_argument_group("what is quantised")
    chosen.add_argument("--group-size", type=int, metavar="N", help="of integers: inputs per scale; -1: one per output")
    chosen.add_argument("--asymmetric", action="store_true", help="integers with a zero point for each group")
    chosen.add_argument(
        "--ignore", nargs="+", default=[], metavar="NAME", help='modules to leave: names, with * or as "re:PATTERN"'
    )
    chosen.add_argument("--head", action="store_true", help="quantise the vocabulary head, too (integers)")
    text = parser.add_argument_group("text: rows as of train-draft")
    text.add_argument(
        "--calibrate", nargs="+", default=[], metavar="ROWS", help="compensate rounding errors on these texts (GPTQ)"
    )
    text.add_argument("--calibration-rows", type=at_least(1), default=128, help="to read at most (default: 128)")
    text.add_argument("--loss-text", nargs="+", default=[], metavar="ROWS", help="of the loss (default: a short text)")
    text.add_argument("--loss-rows", type=at_least(1), default=64, help="to read at most (default: 64)")
    text.add_argument("--no-loss", dest="loss", action="store_false", help="do not measure the loss")
    text.add_argument("--max-length", type=at_least(2), default=512, help="tokens of a row (default: 512)")
    parser.add_argument("--shard-gb", type=at_least(0.001, float), default=2.0, help="GB of a file (default: 2)")
    parser.set_defaults(run="aerie.deploy.quantize.command:run")


def _add_token_map(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "token-map",
        help="count a model's tokens in your text, for a smaller draft head",
        description="Counts how often each token of the model occurs in the rows and writes token_map.json into its "
        "folder. A draft with a trimmed vocabulary head (speculative.draft_vocab_size) proposes the most frequent "
        "ones.",
    )
    parser.add_argument("model", help="folder of the target model, or OWNER/NAME on the hub")
    parser.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="ROWS",
        help=".json or .jsonl files or folders of them, as of `train-draft`; best answers of the model itself",
    )
    parser.set_defaults(run="aerie.deploy.token_map:run")


def _add_tekken(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "tekken",
        help="write tokenizer.json from a Mistral checkpoint's tekken.json",
        description="Writes tokenizer.json, and tokenizer_config.json if it is missing, into the folder of a model "
        "that has only Mistral's tekken.json.",
    )
    parser.add_argument("model", help="folder of the model, or OWNER/NAME on the hub")
    parser.set_defaults(run="aerie.deploy.tekken:run")


def _add_eval_draft(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "eval-draft",
        help="measure a draft's acceptance length on a prompts file",
        description="Answers the prompts of a JSON or JSONL file (question/answer, instruction/input/response, "
        "messages, prompt/response or turns rows) and prints the acceptance length, 1 + accepted / rounds.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("config", nargs="?", default=DEFAULT_CONFIG, help="Serve config file, or a packaged one's name")
    parser.add_argument("--prompts", required=True, help="file or folder of prompts")
    parser.add_argument("--limit", type=at_least(1), default=100, help="prompts to take")
    parser.add_argument("--max-tokens", type=at_least(1), default=256)
    parser.add_argument("--concurrency", type=at_least(1), default=8)
    parser.add_argument("--temperature", type=at_least(0, float), default=0.0)
    shape = parser.add_argument_group("tree, instead of the config file's")
    shape.add_argument("--num-steps", type=int, default=argparse.SUPPRESS)
    shape.add_argument("--top-k", type=int, default=argparse.SUPPRESS)
    shape.add_argument("--num-draft-tokens", type=int, default=argparse.SUPPRESS)
    parser.set_defaults(run="aerie.deploy.evaluate:run")


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="load on a server: latencies at each of several rates",
        description="Sends requests to /v1/completions at random times (Poisson), whether or not earlier ones have "
        "finished. Prompts are random token ids of lognormal lengths; answers are greedy, streamed and of a fixed "
        "length. The same seed, rate and lengths give every server the same requests. Prints a table; --json writes "
        "one JSON object per rate.",
    )
    _add_server(parser)
    parser.add_argument("--rates", default="1,2,4", help="requests per second; inf: all at once (default: 1,2,4)")
    parser.add_argument("--secs", type=float, default=20.0, help="of arrivals at each rate (default: 20)")
    parser.add_argument("--drain-s", type=float, default=60.0, help="after the last arrival, then cancel (default: 60)")
    parser.add_argument("--max-requests", type=int, default=5000, help="at each rate (default: 5000)")
    mixes = ("plain", "prompt-heavy", "throughput")
    parser.add_argument("--mix", choices=mixes, default="plain", help="what the next options default to")
    for side, name in (("in", "prompts"), ("out", "answers")):
        parser.add_argument(f"--{side}-mean", type=float, help=f"tokens of {name} (default: by mix and model)")
        parser.add_argument(f"--{side}-sigma", type=float, help="of their logarithm (default: 0.8)")
        parser.add_argument(f"--{side}-cap", type=int, help="at most (default: by mix and model)")
    parser.add_argument("--share", type=float, help="of the prompts that begin with a common text (default: by mix)")
    parser.add_argument("--prefixes", type=int, help="how many such texts (default: 8)")
    parser.add_argument("--prefix-tokens", type=int, help="of each text (default: by mix and model)")
    parser.add_argument("--vocab", type=int, help=f"prompt ids are below this (default: the model's, {DEFAULT_VOCAB})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm", type=int, default=16, help="requests at once before the first rate (default: 16)")
    parser.add_argument("--extra", default="{}", metavar="JSON", help="goes into every request's body")
    parser.add_argument("--name", default="", help="of the server in the table")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="latencies over rates")
    parser.add_argument("--json", type=Path, metavar="FILE", help="figures, an object a line (-: standard output)")
    parser.set_defaults(run="aerie.deploy.bench.command:run")


def _add_check_cache(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "check-cache",
        help="check that a server's prefix cache changes no answer",
        description="Asks A, B, A again, longer conversations and forks of them on /v1/completions, greedy, with the "
        "cache on and several at a time; then every prompt once more with the cache off, and compares the texts. For "
        "any OpenAI server. Exit code 1 if an answer differs.",
    )
    _add_server(parser)
    parser.add_argument("--conversations", type=at_least(1), default=20, help="of 11 requests each (default: 20)")
    parser.add_argument("--concurrency", type=at_least(1), default=8, help="conversations at once (default: 8)")
    parser.add_argument(
        "--words", type=at_least(8), help="of a prompt, half of them shared (default: 600, less for short models)"
    )
    parser.add_argument("--max-tokens", type=at_least(1), default=64, help="of an answer (default: 64)")
    parser.add_argument(
        "--off",
        choices=("auto", "salt", "flush"),
        default="auto",
        help="how the cache is switched off: a cache_salt per request (Aerie, vLLM), or a flush before each (SGLang)",
    )
    parser.add_argument(
        "--ties",
        type=at_least(0, float),
        default=0.0,
        metavar="NATS",
        help="differences that begin with a token so near to the likeliest one are counted, but are no failure; for "
        "servers whose rounding depends on the batch (default: 0, all are)",
    )
    parser.add_argument("--show", type=at_least(0), default=5, help="differences to print (default: 5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run="aerie.deploy.check_cache:run")


def _add_exact(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    exact = commands.add_parser(
        "exact",
        help="check that a server's answers do not depend on what else it does",
        description="Asks prompts of many lengths on /v1/completions, greedy and with seeds: alone, beside neighbours, "
        "from the cache, and without speculation where the server has a switch. Compares tokens and log-probabilities. "
        "For any OpenAI server. Exit code 1 if an answer differs.",
    )
    every = commands.add_parser(
        "check-server",
        help="`exact`, `check-cache`, and what clients rely on: copies, stops, streams, tools, usage",
        description="Runs `aerie exact` and `aerie check-cache`, and checks identifiers copied under load, stop "
        "strings, streams, tool calls and usage. For any OpenAI server. Exit code 1 if anything is wrong.",
    )
    for parser in (exact, every):
        _add_server(parser)
        parser.add_argument("--prompts", type=at_least(2), default=100, help="to compare (default: 100)")
        parser.add_argument("--words", type=at_least(8), help="of the longest prompt (default: 4000, less if too long)")
        parser.add_argument("--max-tokens", type=at_least(1), default=64, help="of an answer (default: 64)")
        loads = "requests at once (default: 8 32 128)"
        parser.add_argument("--loads", type=at_least(2), nargs="*", default=[8, 32, 128], metavar="N", help=loads)
        texts = "log-probabilities may differ, if tokens do not; for servers whose rounding depends on the batch"
        parser.add_argument("--texts-only", action="store_true", help=texts)
        parser.add_argument("--report", metavar="FILE", help="also write the page that is printed, in Markdown")
        parser.add_argument("--seed", type=int, default=0)
    every.add_argument("--show", type=at_least(0), default=5, help="problems to print of each check (default: 5)")
    every.add_argument("--no-cache", action="store_false", dest="cache", help="leave `check-cache` out")
    exact.set_defaults(run="aerie.deploy.check_server.command:exact")
    every.set_defaults(run="aerie.deploy.check_server.command:check_server")


def _add_chat(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("chat", help="chat with a server in the terminal, tokens coloured by how they came")
    _add_server(parser)
    parser.add_argument("--no-spec", action="store_true", help="begin with speculation off")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=0, help="of an answer (default: as many as fit)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--system", default="", help="system prompt (default: none)")
    parser.set_defaults(run="aerie.deploy.chat:run")
