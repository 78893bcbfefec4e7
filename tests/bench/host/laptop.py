"""A small published model on this machine's CPU: Aerie, transformers and llama.cpp, each in a process of its own,
without a server, with the same number of threads.

    python -m tests.bench laptop MODEL.gguf --node FOLDER [--threads 1] [--turns 3]
    python -m tests.bench laptop MODEL.gguf --node FOLDER --data DATA [--threads 1] [--count 50] [--tokens 64]

Without --data, in turns: tokens/s at 1 and 8 streams while decoding greedily, seconds to the first token of 1,000, CPU
milliseconds of a token at 1 stream, and the process's largest memory. transformers computes in float32, with its
dequantised weights. llama.cpp is node-llama-cpp's prebuilt one: `npm install node-llama-cpp` in FOLDER; without --node
it is left out.

With --data (GSM8K, MT-Bench, HumanEval and Alpaca as `eval/NAME.jsonl`, equal numbers of each), greedy answers to real
questions at one stream: tokens/s, prompts included, of Aerie without and with its draft and of llama.cpp; how many of
the answers are Aerie's, token for token, and how many tokens are equal before the first that differs.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from aerie.deploy.bench.figures import table
from aerie.deploy.config.hub import model_folder
from aerie.speculative.training.samples import answer_prompts
from tests.bench.quality.real_heads import EVAL, questions
from tests.support import ROOT

STREAMS, PROMPT, NEW_TOKENS, LONG = (1, 8), 8, 48, 1000
LIMIT_S = 900
Commands = Mapping[str, tuple[list[str], Path]]
"""Programs that print figures as their last line, and the folders in which they run, by name."""

AERIE = """
import sys, json, time, resource
import torch
threads, model, streams, prompt, new, long = json.loads(sys.argv[1])
torch.set_num_threads(threads)
from pathlib import Path
from aerie.deploy.config.hub import model_folder
from aerie.workers.config import ModelSource, SchedulerConfig, WorkerConfig
from aerie.workers.models.loading import read_target_config
from aerie.workers.runner.layout import plan_engine
from aerie.workers.runner.local_engine import local_engine
from aerie.workers.scheduling.plan import SamplingParams
scheduler = SchedulerConfig(max_running=8).resolved("cpu")
source = ModelSource(str(model_folder(model, None)), device="cpu", max_model_len=2048)
worker = WorkerConfig(source, scheduler=scheduler, measure_costs=False)
with local_engine(worker, plan_engine(worker, read_target_config(source, 1))) as engine:
    def timed(count, length, tokens):
        prompts = [[1000 + (7919 * j + 31 * i + length) % 40000 for j in range(length)] for i in range(count)]
        begin, used = time.perf_counter(), time.process_time()
        engine.generate(prompts, SamplingParams(tokens, 0.0), count)
        return time.perf_counter() - begin, time.process_time() - used
"""
TRANSFORMERS = """
import sys, json, time, resource
import torch
from pathlib import Path
from transformers import AutoModelForCausalLM
threads, model, streams, prompt, new, long = json.loads(sys.argv[1])
torch.set_num_threads(threads)
path = Path(model)
net = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
if True:
    def timed(count, length, tokens):
        ids = torch.tensor([[1000 + (7919 * j + 31 * i) % 40000 for j in range(length)] for i in range(count)])
        begin, used = time.perf_counter(), time.process_time()
        with torch.inference_mode():
            net.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
            )
        return time.perf_counter() - begin, time.process_time() - used
"""
MEASURE = """
    timed(1, prompt, 2)
    found = {}
    for count in streams:
        first, rest = timed(count, prompt, 1), timed(count, prompt, new + 1)
        found[f"tokens/s, {count}"] = count * new / (rest[0] - first[0])
        if count == 1:
            found["CPU ms a token"] = (rest[1] - first[1]) * 1e3 / new
    found["first token, s"] = timed(1, long, 1)[0]
    found["MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(json.dumps(found))
"""
LLAMA = """
import {getLlama} from "node-llama-cpp";
const [threads, path, streams, prompt, fresh, long] = JSON.parse(process.argv.at(-1));
const llama = await getLlama({gpu: false, build: "never", maxThreads: threads});
const model = await llama.loadModel({modelPath: path});
async function timed(count, length, tokens) {
  const contextSize = length + tokens + 32;
  const context = await model.createContext({sequences: count, contextSize, threads, batchSize: 512});
  const begin = performance.now(), used = process.cpuUsage();
  await Promise.all(Array.from({length: count}, async (_, i) => {
    const ids = Array.from({length}, (_, j) => 1000 + (7919 * j + 31 * i) % 40000);
    let n = 0;
    for await (const _ of context.getSequence().evaluate(ids, {temperature: 0, yieldEogToken: true}))
      if (++n >= tokens) break;
  }));
  const spent = process.cpuUsage(used), took = (performance.now() - begin) / 1e3;
  await context.dispose();
  return [took, (spent.user + spent.system) / 1e6];
}
await timed(1, prompt, 2);
const found = {};
for (const count of streams) {
  const first = await timed(count, prompt, 1), rest = await timed(count, prompt, fresh + 1);
  found[`tokens/s, ${count}`] = count * fresh / (rest[0] - first[0]);
  if (count === 1) found["CPU ms a token"] = (rest[1] - first[1]) * 1e3 / fresh;
}
found["first token, s"] = (await timed(1, long, 1))[0];
found["MB"] = process.resourceUsage().maxRSS / 1e3;
console.log(JSON.stringify(found));
process.exit(0);
"""
AERIE_TEXTS = """
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
LLAMA_TEXTS = """
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


def commands_of(
    arguments: argparse.Namespace, given: list[Any], scripts: Mapping[str, tuple[str, list[Any]]], llama: str
) -> Commands:
    """Return the programs. given: arguments of all; scripts: Python with its further arguments, by name; llama: for
    node."""
    commands = {
        name: ([sys.executable, "-c", script, json.dumps([*given, *own])], ROOT)
        for name, (script, own) in scripts.items()
    }
    if arguments.node is not None:
        script = arguments.node / "aerie_laptop.mjs"  # beside node_modules, where node looks for packages
        script.write_text(llama)
        commands["llama.cpp"] = (["node", script.name, json.dumps(given)], arguments.node)
    return commands


def figures_of(commands: Commands) -> dict[str, dict[str, Any]]:
    """Run the programs one after the other."""
    figures = {}
    for name, (command, folder) in commands.items():
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S)
        figures[name] = json.loads(done.stdout.splitlines()[-1])
    return figures


def compare_speed(arguments: argparse.Namespace) -> None:
    """Measure rates, the first token and memory, in turns."""
    given = [arguments.threads, str(arguments.model.resolve()), STREAMS, PROMPT, NEW_TOKENS, LONG]
    scripts: dict[str, tuple[str, list[Any]]] = {
        "Aerie": (AERIE + MEASURE, []),
        "transformers": (TRANSFORMERS + MEASURE, []),
    }
    commands = commands_of(arguments, given, scripts, LLAMA)
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for _ in range(arguments.turns):
        for name, figures in figures_of(commands).items():
            turns[name].append(figures)
            print(name, figures, file=sys.stderr, flush=True)
    medians = {
        name: {key: statistics.median(turn[key] for turn in figures) for key in figures[0]}
        for name, figures in turns.items()
    }
    keys = list(medians["Aerie"])
    rows = [(name, *(f"{figures[key]:.3g}" for key in keys)) for name, figures in medians.items()]
    print(*table(["", *keys], rows), sep="\n")
    print(json.dumps({"turns": turns, "medians": medians}))


def compare_answers(arguments: argparse.Namespace) -> None:
    """Measure the answers to real questions."""
    tokenizer = AutoTokenizer.from_pretrained(str(model_folder(str(arguments.model), None)))
    per_set = -(-arguments.count // len(EVAL))
    conversations = [question for name in EVAL for question in questions(arguments, name, per_set)]
    prompts = answer_prompts(conversations, tokenizer)[: arguments.count]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.json"
        path.write_text(json.dumps(prompts))
        given = [arguments.threads, str(arguments.model.resolve()), arguments.tokens, str(path)]
        scripts = {"Aerie": (AERIE_TEXTS, [False]), "Aerie with its draft": (AERIE_TEXTS, [True])}
        answers = figures_of(commands_of(arguments, given, scripts, LLAMA_TEXTS))
    rows = []
    for name, figures in answers.items():
        same = [num_equal(*pair) for pair in zip(answers["Aerie"]["answers"], figures["answers"], strict=True)]
        rate = arguments.tokens * len(prompts) / figures["seconds"]
        rows.append((name, f"{rate:.1f}", sum(n == arguments.tokens for n in same), f"{statistics.mean(same):.1f}"))
    print(*table(["", "tokens/s", f"equal of {len(prompts)}", "equal tokens, mean"], rows), sep="\n")
    seconds = {name: figures["seconds"] for name, figures in answers.items()}
    print(json.dumps({"bench": "laptop", "seconds": seconds, "rows": rows}))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench laptop", description=__doc__.partition("\n\n")[0])
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--node", type=Path, help="folder with node_modules/node-llama-cpp")
    parser.add_argument("--data", type=Path, help="folder of eval/NAME.jsonl: compare answers instead")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--count", type=int, default=50, help="questions")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    arguments = parser.parse_args()
    (compare_speed if arguments.data is None else compare_answers)(arguments)
