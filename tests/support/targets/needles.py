"""Needles in long texts, and a small model that finds them, for tests of FP8 KV.

    python -m tests.support.targets.needles --output tests/models/retrieval_tiny     # trains it in minutes

A text is filler with needles at random places: a key and four values, all different. At its end a key is asked, and
the values that followed it are the answer. That takes two layers (an induction head, arXiv 2209.11895): the first tells
each token which token is before it, the second looks for the token after the asked one.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

KEYS, VALUES, VOCAB = range(2, 66), range(66, 194), 256  # the rest is filler; 0 begins a text
ANSWER = 4  # tokens of an answer
LENGTHS = (256, 512, 1024, 2048)
NEEDLES = 12
ROPE_THETA, HEAD_DIM, CONTENT = 1e6, 64, 41
RIGHT = 0.97  # share of right tokens, smoothed over ten steps, from which on texts get longer


def texts(rows: int, length: int, needles: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return texts without their questions [rows, length] int64, the keys in them [rows, needles], and the answers
    [rows, needles, ANSWER]."""
    found = torch.randint(VALUES.stop, VOCAB, (rows, length), generator=generator)
    found[:, 0] = 0
    places = (length - 1) // (ANSWER + 1)
    keys, values = torch.empty(rows, needles, dtype=torch.long), torch.empty(rows, needles, ANSWER, dtype=torch.long)
    for row in range(rows):
        keys[row] = KEYS.start + torch.randperm(len(KEYS), generator=generator)[:needles]
        picked = torch.randperm(len(VALUES), generator=generator)[: needles * ANSWER]
        values[row] = VALUES.start + picked.view(needles, ANSWER)
        starts = 1 + (ANSWER + 1) * torch.randperm(places, generator=generator)[:needles]
        for start, key, answer in zip(starts.tolist(), keys[row], values[row], strict=True):
            found[row, start] = key
            found[row, start + 1 : start + 1 + ANSWER] = answer
    return found, keys, values


def untrained() -> Any:
    """Return a Llama of two layers, whose first head in each is set by hand as an induction head with scores of a few
    units; the second heads and the MLPs are random."""
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "default", "rope_theta": ROPE_THETA}
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        rope_parameters=rope,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    half, own, before, out = HEAD_DIM // 2, slice(1, 42), slice(42, 83), slice(83, 124)
    frequencies = ROPE_THETA ** (-torch.arange(half) / half)
    fast, slow = torch.arange(12), torch.cat((torch.arange(20, half), torch.arange(half + 20, HEAD_DIM)))
    eye = torch.eye(CONTENT)
    with torch.no_grad():
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding.zero_()
        embedding[:, own] = torch.nn.functional.normalize(torch.randn(VOCAB, CONTENT), dim=1)
        embedding[:, 0] = 1.0  # the same for all tokens: positions alone decide the first head's scores
        first, second = (layer.self_attn for layer in model.model.layers)
        for attention in (first, second):
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
                projection.weight[:HEAD_DIM] = 0
            attention.o_proj.weight[:, :HEAD_DIM] = 0
            attention.v_proj.weight[:CONTENT, own] = eye
        first.k_proj.weight[fast, 0] = 1.0
        first.q_proj.weight[fast, 0] = frequencies[fast].cos()
        first.q_proj.weight[half + fast, 0] = -frequencies[fast].sin()  # one token back
        first.o_proj.weight[before, :CONTENT] = 0.5 * eye
        second.q_proj.weight[slow, own.start : own.start + len(slow)] = torch.eye(len(slow))
        second.k_proj.weight[slow, before.start : before.start + len(slow)] = torch.eye(len(slow))
        second.o_proj.weight[out, :CONTENT] = 2 * eye
        head.zero_()
        head[VALUES.start : VALUES.stop, out] = embedding[VALUES.start : VALUES.stop, own]
    return model


def trained(limit_s: float, batch_tokens: int = 3072, seed: int = 0) -> Any:
    """Return a trained model. Texts get longer as soon as nearly all answers are right, so that scores are not much
    sharper than a length asks for."""
    torch.manual_seed(seed)
    model, generator = untrained(), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    start_s, step, right = time.monotonic(), 0, 0.5
    lengths = list(LENGTHS)
    while lengths and time.monotonic() - start_s < limit_s:
        length, needles = lengths[0], min(NEEDLES, lengths[0] // 12)
        tokens, keys, values = texts(max(2, batch_tokens // length), length, needles, generator)
        asked = torch.cat((keys.unsqueeze(2), values), 2)
        asked = asked[:, torch.randperm(needles, generator=generator)]
        hidden = model.model(torch.cat((tokens, asked.flatten(1)), 1)).last_hidden_state[:, length:]
        logits = model.lm_head(hidden.unflatten(1, (needles, ANSWER + 1))[:, :, :-1]).flatten(0, 2)
        targets = asked[:, :, 1:].flatten()
        loss = cross_entropy(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        right += 0.1 * (float((logits.argmax(-1) == targets).float().mean()) - right)
        if step % 10 == 1 or right > RIGHT:
            print(f"step {step}, {length} tokens: loss {loss:.3f}, right {right:.3f}", flush=True)
        if right > RIGHT:
            lengths.pop(0)
            right = 0.8
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10)
    arguments = parser.parse_args()
    trained(60 * arguments.minutes).to(torch.bfloat16).save_pretrained(arguments.output)


if __name__ == "__main__":
    main()
