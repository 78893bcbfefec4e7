"""Which embedding a draft should get for the placeholders of a picture.

    python -m tests.bench image_drafts [--steps 100] [--seeds 3] [--model FOLDER]

Trains EAGLE-3 heads for the small model that reads digits in pictures (`tests.support.targets.trained_pictures`), with
each of these as the embedding of a picture's tokens: that of the placeholder's id, as the engine has it; the vision
tower's, which the target has; zeros. Then measures greedy chains of five tokens over answers about new pictures: mean
tokens a round, with the target's own, from every position of the answer. The heads read the same features of the
target. Needs no GPU.
"""

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aerie.deploy.bench.figures import table
from aerie.speculative.drafts.eagle3 import Eagle3
from aerie.speculative.drafts.eagle3_config import ARCHITECTURE
from aerie.speculative.training.draft import read_head
from aerie.speculative.training.eagle3 import Eagle3Head
from aerie.workers.vision.processor import load_processor
from tests.bench.machine import machine
from tests.support.targets.image_models import IMAGE_TOKEN
from tests.support.targets.trained_pictures import BATCH, CHECKPOINT, batch_of

KINDS = ("placeholder", "tower", "zeros")
DEPTH, DECAY = 5, 0.8  # as in EAGLE-3's training


def head_of(target: Any, seed: int) -> Eagle3Head:
    text = target.config.text_config
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": text.hidden_size,
        "target_hidden_size": text.hidden_size,
        "intermediate_size": 128,
        "num_attention_heads": text.num_attention_heads,
        "num_key_value_heads": text.num_key_value_heads,
        "head_dim": text.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": text.rms_norm_eps,
        "vocab_size": text.vocab_size,
        "draft_vocab_size": text.vocab_size,
        "max_position_embeddings": text.max_position_embeddings,
        "rope_theta": 10000.0,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
    }
    torch.manual_seed(seed)
    head = Eagle3Head(read_head(Eagle3, config, target, Path("head")))
    for module in head.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.05)
    head.lm_head.weight.data.copy_(target.get_output_embeddings().weight.float())
    return head


@torch.no_grad()
def view(target: Any, head: Eagle3Head, given: dict[str, Any], kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return embeddings [B, T, H], captured features [B, T, F], and the target's greedy next tokens [B, T]."""
    output = target(**given, output_hidden_states=True)
    embeddings = target.get_input_embeddings()(given["input_ids"]).clone()
    of_pictures = given["input_ids"] == IMAGE_TOKEN
    if kind == "tower":
        rows = target.model.get_image_features(given["pixel_values"], given["image_grid_thw"]).pooler_output
        embeddings[of_pictures] = torch.cat(list(rows)).to(embeddings.dtype)
    elif kind == "zeros":
        embeddings[of_pictures] = 0.0
    return embeddings, head.features(output), output.logits.argmax(-1)


def train(target: Any, processor: Any, kind: str, steps: int, seed: int) -> Eagle3Head:
    head, generator = head_of(target, seed), random.Random(1000 + seed)
    optimizer = torch.optim.AdamW(head.parameters(), 2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, pct_start=0.1)
    for _ in range(steps):
        given, labels = batch_of(processor, generator)
        embeddings, captured, greedy = view(target, head, given, kind)
        loss = torch.zeros(())
        for step, hidden in enumerate(head.unroll(embeddings, captured, DEPTH)):
            # row n of step s predicts token n + s + 2, which the target predicts in row n + s + 1
            logits, wanted = head.logits(hidden)[:, : -step - 1], greedy[:, step + 1 :].clone()
            wanted[labels[:, step + 1 :].roll(-1, 1) == -100] = -100
            own = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100)
            loss = loss + DECAY**step * own
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return head


@torch.no_grad()
def tokens_per_round(target: Any, processor: Any, head: Eagle3Head, kind: str, num_batches: int = 4) -> float:
    """Return the mean tokens of a round, from every token of the answers."""
    generator, accepted, rounds = random.Random(7), 0, 0
    for _ in range(num_batches):
        given, labels = batch_of(processor, generator, BATCH)
        embeddings, captured, greedy = view(target, head, given, kind)
        steps = [head.logits(hidden).argmax(-1) for hidden in head.unroll(embeddings, captured, DEPTH)]
        wanted, length = labels.roll(-1, 1), labels.shape[1]  # row n: token n + 1
        for row in range(length):
            alive = wanted[:, row] != -100  # the target's own token of the round is one of the answer
            alive &= (greedy[:, row] == wanted[:, row]) & (wanted[:, row] != 1)
            rounds += int(alive.sum())
            for step, drafted in enumerate(steps):
                if row + step + 1 >= length:
                    break
                alive &= (drafted[:, row] == greedy[:, row + step + 1]) & (wanted[:, row + step + 1] != -100)
                accepted += int(alive.sum())
    return 1 + accepted / rounds


def main() -> None:
    from transformers import AutoModelForImageTextToText

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    arguments = parser.parse_args()
    target = AutoModelForImageTextToText.from_pretrained(arguments.model, dtype=torch.float32).eval()
    target.requires_grad_(False)
    processor, found = load_processor(str(arguments.model)), {kind: list[float]() for kind in KINDS}
    for seed in range(arguments.seeds):
        for kind, own in found.items():
            head = train(target, processor, kind, arguments.steps, seed)
            own.append(round(tokens_per_round(target, processor, head, kind), 4))
            print(kind, seed, own[-1], flush=True)
    rows = [(kind, round(statistics.mean(own), 3), min(own), max(own)) for kind, own in found.items()]
    print(*table(["embedding of pictures", "tokens a round", "least", "most"], rows), sep="\n")
    print(json.dumps({"bench": "image_drafts", "machine": machine(), "steps": arguments.steps, "found": found}))


if __name__ == "__main__":
    main()
