"""Greedy answers of a small published model to real questions on this machine's CPU: Aerie without and with its draft,
and llama.cpp, each in a process of its own without a server, with the same number of threads, one stream.

    python -m tests.bench laptop_texts MODEL.gguf --data FOLDER --node FOLDER [--count 50] [--tokens 64] [--threads 1]

Tokens/s, prompts included; how many of llama.cpp's answers are Aerie's, token for token, and how many tokens are equal
before the first that differs. data: GSM8K, MT-Bench, HumanEval and Alpaca as `NAME.jsonl`, equal numbers of each. node:
see `tests.bench.host.laptop`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

from aerie.deploy.bench.figures import table
from aerie.deploy.config.hub import model_folder
from aerie.speculative.training.samples import answer_prompts
from tests.bench.quality.real_heads import EVAL, questions
from tests.support import ROOT

LIMIT_S = 900

AERIE = """
import sys, json, time
import torch
threads, model, tokens, path, draft = json.loads(sys.argv[1])
torch.set_num_threads(threads)
from aerie.deploy.config.hub import model_folder
from aerie.deploy.config.hub import DRAFT
from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import ModelSource, SchedulerConfig, WorkerConfig
from aerie.workers.scheduling.plan import SamplingParams
own = {key.partition(".")[2]: value for key, value in DRAFT.items()}
source = ModelSource(str(model_folder(model, None)), device="cpu", max_model_len=2048)
worker = WorkerConfig(source, scheduler=SchedulerConfig(max_running=1).resolved("cpu"))
with local_engine(EngineSpec(worker, SpeculativeConfig(**own) if draft else None)) as engine:
    prompts, sampling = json.load(open(path)), SamplingParams(tokens, 0.0)
    engine.generate(prompts[:2], sampling, 1)
    begin = time.perf_counter()
    answers = [list(each.output) for each in engine.generate(prompts, sampling, 1)]
    print(json.dumps({"seconds": time.perf_counter() - begin, "answers": answers}))
"""
LLAMA = """
import {getLlama} from "node-llama-cpp";
import {readFileSync} from "node:fs";
const [threads, model, tokens, path] = JSON.parse(process.argv.at(-1));
const llama = await getLlama({gpu: false, build: "never", maxThreads: threads});
const loaded = await llama.loadModel({modelPath: model});
const prompts = JSON.parse(readFileSync(path));
const contextSize = Math.max(...prompts.map(ids => ids.length)) + tokens + 32;
const context = await loaded.createContext({contextSize, threads, batchSize: 512});
const sequence = context.getSequence();
async function answer(ids) {
  await sequence.clearHistory();
  const found = [];
  for await (const token of sequence.evaluate(ids, {temperature: 0, yieldEogToken: true}))
    if (found.push(token) >= tokens) break;
  return found;
}
for (const ids of prompts.slice(0, 2)) await answer(ids);
const begin = performance.now(), answers = [];
for (const ids of prompts) answers.push(await answer(ids));
console.log(JSON.stringify({seconds: (performance.now() - begin) / 1e3, answers}));
process.exit(0);
"""


def num_equal(one: list[int], other: list[int]) -> int:
    """Return the number of equal tokens before the first that differs."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, pair in pairs if pair[0] != pair[1]), min(len(one), len(other)))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench laptop_texts", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--data", type=Path, required=True, help="folder of eval/NAME.jsonl")
    parser.add_argument("--node", type=Path, help="folder with node_modules/node-llama-cpp")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(str(model_folder(str(arguments.model), None)))
    each = -(-arguments.count // len(EVAL))
    asked = [question for name in EVAL for question in questions(arguments, name, each)]
    prompts = answer_prompts(asked, tokenizer)[: arguments.count]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.json"
        path.write_text(json.dumps(prompts))
        given = [arguments.threads, str(arguments.model.resolve()), arguments.tokens, str(path)]
        commands = {
            "Aerie": ([sys.executable, "-c", AERIE, json.dumps([*given, False])], ROOT),
            "Aerie with its draft": ([sys.executable, "-c", AERIE, json.dumps([*given, True])], ROOT),
        }
        if arguments.node is not None:
            script = arguments.node / "aerie_laptop_texts.mjs"
            script.write_text(LLAMA)
            commands["llama.cpp"] = (["node", script.name, json.dumps(given)], arguments.node)
        for name, (command, cwd) in commands.items():
            done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S)
            found[name] = json.loads(done.stdout.splitlines()[-1])
    rows = []
    for name, figures in found.items():
        same = [num_equal(*pair) for pair in zip(found["Aerie"]["answers"], figures["answers"], strict=True)]
        rate = arguments.tokens * len(prompts) / figures["seconds"]
        rows.append((name, f"{rate:.1f}", sum(n == arguments.tokens for n in same), f"{statistics.mean(same):.1f}"))
    print(*table(["", "tokens/s", f"equal of {len(prompts)}", "equal tokens, mean"], rows), sep="\n")
    seconds = {name: figures["seconds"] for name, figures in found.items()}
    print(json.dumps({"bench": "laptop_texts", "seconds": seconds, "rows": rows}))


if __name__ == "__main__":
    main()
