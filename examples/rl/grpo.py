"""Trains the embedded model with GRPO on GSM8K: an Aerie engine and a trainer on one Ray cluster, without HTTP.

    python examples/rl/grpo.py train.jsonl --steps 20 --out with.json
    python examples/rl/grpo.py train.jsonl --steps 20 --no-draft --out without.json

train.jsonl: lines {"question": .., "answer": ".. #### 18"} (https://github.com/openai/grade-school-math). Each step:
answers from the engine, by Serve's handle, with log-probabilities and the version of the weights; one step of GRPO in
the trainer's actor; all weights to the engine, by gloo. In float32, answers are equal with and without drafts: compare
`texts`, a digest of a step's tokens. The embedded model is too small to solve the problems. So the reward is 1 for the
right number, and else the share of digits in the answer, which it can learn.
"""

import argparse
import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any

import ray
import torch
from ray import serve
from transformers import AutoModelForCausalLM, AutoTokenizer

import aerie.deploy
from aerie.deploy.app import build
from aerie.workers.distributed.ports import free_port
from aerie.workers.distributed.weight_transfer.sender import WeightSender, announcement

MODELS = Path(aerie.deploy.__path__[0]) / "models"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
GROUP, PROMPTS, TOKENS = 4, 2, 32  # answers to a question, questions of a step, tokens of an answer


def reward(text: str, wanted: str) -> float:
    """Return the reward of an answer."""
    if wanted in NUMBER.findall(text.replace(",", "")):
        return 1.0
    return sum(letter.isdigit() for letter in text) / max(1, len(text))


@ray.remote(num_cpus=0)
class Trainer:
    """The policy in torch."""

    def __init__(self, rate: float) -> None:
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(str(MODELS / "target"), dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=rate)
        self._sender: WeightSender | None = None

    def port(self) -> tuple[str, int]:
        """Return the address for the engine's ranks."""
        self._address = ray.util.get_node_ip_address(), free_port()
        return self._address

    def join(self, num_ranks: int) -> None:
        """Wait for the engine's ranks."""
        self._sender = WeightSender(*self._address, 1 + num_ranks)

    def train(self, prompts: list[list[int]], answers: list[list[dict[str, Any]]]) -> dict[str, float]:
        """Do one step. answers: of each prompt, with token ids, log-probabilities and rewards."""
        self._optimizer.zero_grad()
        num_tokens = sum(len(answer["ids"]) for group in answers for answer in group)
        difference = 0.0
        for prompt, group in zip(prompts, answers, strict=True):
            rewards = torch.tensor([answer["reward"] for answer in group])
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            for answer, advantage in zip(group, advantages.tolist(), strict=True):
                ids = torch.tensor([prompt + answer["ids"]])
                logits = self._model(ids).logits[0, len(prompt) - 1 : -1].float()
                logprobs = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
                difference += float((logprobs.detach() - torch.tensor(answer["logprobs"])).abs().sum())
                (-advantage * logprobs.sum() / num_tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return {"gradient": float(norm), "logprob_difference": difference / num_tokens}

    def announcement(self) -> dict[str, Any]:
        """Return what `send` sends."""
        return announcement(self._tensors())

    def send(self) -> None:
        """Send all weights."""
        assert self._sender is not None
        self._sender.send(self._tensors())

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in self._model.named_parameters()}


def engine(has_draft: bool) -> serve.handle.DeploymentHandle:
    """Start the engine, and return its handle."""
    args: dict[str, Any] = {
        "model": {"path": str(MODELS / "target"), "device": "cpu", "dtype": "float32"},
        "parallel": {"tensor_parallel": 1},
    }
    if has_draft:
        args["speculative"] = {"method": "dspark", "path": str(MODELS / "dspark"), "num_steps": 8, "top_k": 4}
        args["speculative"] |= {"num_draft_tokens": 16, "draft_tp": 1}
    serve.start(proxy_location="Disabled")
    return serve.run(build(args), name="aerie", route_prefix="/")


def answers_to(
    model: serve.handle.DeploymentHandle, prompts: list[list[int]], wanted: list[str], step: int
) -> tuple[list[list[dict[str, Any]]], dict[str, Any]]:
    """Return a group of answers to each prompt, and what they say of speculation and weights."""
    body = {"max_tokens": TOKENS, "temperature": 1.0, "logprobs": 0, "return_token_ids": True}
    body["return_weight_versions"] = True
    asked = [
        model.completions.remote({**body, "prompt": prompt, "seed": 1000 * step + GROUP * i + k})
        for i, prompt in enumerate(prompts)
        for k in range(GROUP)
    ]
    answers, lengths, versions, texts = [], [], set(), []
    for number, response in enumerate(asked):
        reply = response.result(timeout_s=300)
        choice = reply["choices"][0]
        ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        given = reward(choice["text"], wanted[number // GROUP])
        answers.append({"ids": ids, "logprobs": logprobs, "reward": given})
        versions |= {each["version"] for each in choice["weight_versions"]}
        texts.append(ids)
        if "metrics" in reply:
            lengths.append(reply["metrics"]["speculative_decoding"]["mean_acceptance_length"])
    groups = [answers[i : i + GROUP] for i in range(0, len(answers), GROUP)]
    return groups, {
        "reward": sum(answer["reward"] for answer in answers) / len(answers),
        "acceptance": sum(lengths) / len(lengths) if lengths else None,
        "versions": sorted(versions),
        "texts": hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16],
    }


def update(model: serve.handle.DeploymentHandle, trainer: Any, version: str) -> float:
    """Send the trainer's weights to the engine. Return the seconds in which its steps waited."""
    model.administer.remote("start_weight_update").result()
    info = ray.get(trainer.announcement.remote())
    sent = trainer.send.remote()
    model.administer.remote("update_weights", {"update_info": info}).result()
    ray.get(sent)
    reply = model.administer.remote("finish_weight_update", {"weight_version": version}).result()
    (found,) = reply["engines"]
    assert not found["missing"].get("target"), found
    return float(found["took_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rate", type=float, default=2e-5, help="learning rate")
    parser.add_argument("--no-draft", action="store_true", help="without speculation")
    parser.add_argument("--out", type=Path, help="the file of the results, JSON")
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.data.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(str(MODELS / "target"))
    ray.init(address="local")
    model, trainer = engine(not arguments.no_draft), Trainer.remote(arguments.rate)
    address, port = ray.get(trainer.port.remote())
    num_ranks = model.administer.remote("get_world_size").result()["world_size"]
    joined = trainer.join.remote(num_ranks)
    group = {"master_address": address, "master_port": port, "world_size": 1 + num_ranks}
    model.administer.remote("init_weight_transfer_engine", {"init_info": group}).result()
    ray.get(joined)
    results = []
    for step in range(arguments.steps):
        began_s = time.monotonic()
        chosen = [rows[(step * PROMPTS + i) % len(rows)] for i in range(PROMPTS)]
        prompts = [tokenizer(f"Question: {row['question']}\nAnswer:")["input_ids"] for row in chosen]
        wanted = [row["answer"].rpartition("####")[2].strip().replace(",", "") for row in chosen]
        answers, found = answers_to(model, prompts, wanted, step)
        found["rollout_s"] = time.monotonic() - began_s
        found |= ray.get(trainer.train.remote(prompts, answers))
        found["switch_s"] = update(model, trainer, f"step-{step + 1}")
        found["step_s"] = time.monotonic() - began_s
        results.append({"step": step, **found})
        print(json.dumps(results[-1]), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
