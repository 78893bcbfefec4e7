"""A small published model on this machine's CPU: Aerie, transformers and llama.cpp in turns, each in a process of its
own without a server, with the same number of threads.

    python -m tests.bench laptop MODEL.gguf --node FOLDER [--threads 1] [--turns 3]

Tokens/s at 1 and 8 streams while decoding greedily, seconds to the first token of 1,000, CPU milliseconds of a token at
1 stream, and the process's largest memory. transformers computes in float32, with its dequantised weights. llama.cpp is
node-llama-cpp's prebuilt one: `npm install node-llama-cpp` in FOLDER; without --node it is left out.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from aerie.deploy.bench.figures import table
from tests.support import ROOT

STREAMS, PROMPT, NEW_TOKENS, LONG = (1, 8), 8, 48, 1000
LIMIT_S = 300

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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench laptop", description=__doc__.partition("\n\n")[0])
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--node", type=Path, help="folder with node_modules/node-llama-cpp")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    given = json.dumps([arguments.threads, str(arguments.model.resolve()), STREAMS, PROMPT, NEW_TOKENS, LONG])
    commands = {
        "Aerie": ([sys.executable, "-c", AERIE + MEASURE, given], ROOT),
        "transformers": ([sys.executable, "-c", TRANSFORMERS + MEASURE, given], ROOT),
    }
    if arguments.node is not None:
        script = arguments.node / "aerie_laptop.mjs"  # beside node_modules, where node looks for packages
        script.write_text(LLAMA)
        commands["llama.cpp"] = (["node", script.name, given], arguments.node)
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for _ in range(arguments.turns):
        for name, (command, folder) in commands.items():
            done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S)
            turns[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(name, turns[name][-1], file=sys.stderr, flush=True)
    medians = {
        name: {key: statistics.median(turn[key] for turn in found) for key in found[0]} for name, found in turns.items()
    }
    keys = list(medians["Aerie"])
    rows = [(name, *(f"{each[key]:.3g}" for key in keys)) for name, each in medians.items()]
    print(*table(["", *keys], rows), sep="\n")
    print(json.dumps({"turns": turns, "medians": medians}))
