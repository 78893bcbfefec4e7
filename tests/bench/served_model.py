"""Which model a bench over HTTP starts a server with: a configuration of this host's, or dummy weights on a GPU.

Used by `tests.bench.open_loop`, `tests.bench.tracing.first_token` and `tests.bench.host.startup`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from aerie.deploy.config.files import find_config
from tests.bench.models import configured, deepseek_rank
from tests.bench.round import MODELS, QUANTIZATIONS, SHAPES, quantize_config, write_checkpoints
from tests.support.embedded import read_config_file

ACCEPTANCE_LENGTH = 3.0  # synthetic, of dummy weights
_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `server_config` reads."""
    parser.add_argument("--config", default="eagle", help="Serve config file, or one of Aerie's (default: eagle)")
    parser.add_argument("--gpu", action="store_true", help="dummy weights of --model on a GPU in place of --config")
    parser.add_argument(
        "--model", choices=sorted({*MODELS, *configured.CONFIGS}), default="llama-3.1-8b", help="with --gpu"
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="chain", help="with --gpu (plain: no speculation)")
    parser.add_argument(
        "--quantization", choices=("none", *QUANTIZATIONS), default="none", help="of the target, with --gpu"
    )
    parser.add_argument("--tensor-parallel", type=int, default=1, help="with --gpu")
    parser.add_argument("--max-running", type=int, default=128, help="with --gpu")
    parser.add_argument("--memory-gb", default="24", help="of each rank's KV cache, or auto, with --gpu")
    parser.add_argument("--max-model-len", type=int, default=8192, help="with --gpu")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="with --gpu")
    parser.add_argument("--no-haproxy", action="store_true", help="Serve's Python proxy")
    parser.add_argument("--start-limit", type=float, default=300.0, help="seconds until /health must be 200")


def server_config(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The Serve config file's content. Checkpoints of dummy weights are written to `folder`."""
    if not arguments.gpu:
        return read_config_file(find_config(arguments.config))
    content = read_config_file(find_config("eagle"))
    args = content["applications"][0]["args"]
    write_checkpoints(folder, arguments.model)
    if arguments.quantization != "none":
        quantize_config(folder / "target" / "config.json", arguments.quantization)
    write_tokenizer(folder / "target", _vocab(arguments.model))
    args["model"] = {
        "path": str(folder / "target"),
        "load_format": "dummy",
        "max_model_len": arguments.max_model_len,
        "device": arguments.device,
    }
    args["parallel"] = {"tensor_parallel": arguments.tensor_parallel}
    args["cache"] = {"memory_gb": "auto" if arguments.memory_gb == "auto" else float(arguments.memory_gb)}
    args["scheduler"] = {"max_running": arguments.max_running}
    if arguments.model in deepseek_rank.CONFIGS:  # as its model is served
        served = read_config_file(find_config("deepseek-v3"))["applications"][0]["args"]
        args["graph_capture"] = served["graph_capture"]
        args["cache"]["page_size"] = served["cache"]["page_size"]
        args["scheduler"]["max_step_tokens"] = served["scheduler"]["max_step_tokens"]
    del args["speculative"]
    tree = SHAPES[arguments.shape]
    if tree is not None:
        has_own = arguments.model in configured.CONFIGS
        args["speculative"] = {
            **({"method": "mtp"} if has_own else {"path": str(folder / "draft")}),
            **dict(zip(("num_steps", "top_k", "num_draft_tokens"), tree, strict=True)),
            "synthetic_acceptance_length": ACCEPTANCE_LENGTH,
        }
    return content


def prompt_ids(arguments: argparse.Namespace) -> range:
    """Token ids that prompts may be drawn from: those of the embedded tokenizer's words, or of the dummy's."""
    if not arguments.gpu:
        return range(300, 1500)
    vocab = _vocab(arguments.model)
    return range(min(300, vocab // 4), min(16000, vocab))


def _vocab(model: str) -> int:
    return int(configured.CONFIGS[model]["vocab_size"]) if model in configured.CONFIGS else MODELS[model].vocab


def label(arguments: argparse.Namespace) -> str:
    """Return what was served, for a table's head."""
    if not arguments.gpu:
        return str(arguments.config)
    ranks = f" on {arguments.tensor_parallel}" if arguments.tensor_parallel > 1 else ""
    formats = "" if arguments.quantization == "none" else f" in {arguments.quantization}"
    return f"{arguments.model}{ranks}{formats}, dummy weights, {arguments.shape}"


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer whose every token shows as text, so that any token that dummy weights choose is an event;
    with a chat template, and without an end of sequence."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = letters + [f"Ġ{number:x}" for number in range(vocab_size - len(letters))]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names[:vocab_size])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": _TEMPLATE}))
