"""The tables of docs/attention-backends.md, from the facts that refuse a start:
`python -m tests.attention.backends.matrix`.

Asked are the conformance suite's uses, one fact changed at a time. What a backend needs installed does not count."""

import dataclasses
import sys

import torch

from aerie.attention.config import PAGE_SIZES
from aerie.attention.limits import AttentionUse
from aerie.attention.registry import BACKENDS, limit
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.capability import Capability
from aerie.kernels.kv.batches import Mode
from aerie.kernels.kv.stored_values import FP8
from tests.support.kernels.attention_cases import WORKS, Shape, use_of

PLACES = {
    "CPU": ("cpu", None),
    "8.0": ("cuda", (8, 0)),
    "9.0": ("cuda", (9, 0)),
    "10.0": ("cuda", (10, 0)),
    "12.0": ("cuda", (12, 0)),
}
LATENT = Shape(576, 128, 64, latent=512)  # DeepSeek's, all heads on a rank
UNTRIED = {("trtllm", "latent rows")}  # kernels of GPUs that none of ours is
GPU_8, GPU_10, GPU_12 = (Capability("cuda", (major, 0)) for major in (8, 10, 12))
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 192, 256, 512)
GROUPS = (1, 3, 4, 8, 16, 32, 64)
RULES = {
    "windows": ScoreRule(0.1, window=1024),
    "soft caps": ScoreRule(0.1, soft_cap=50.0),
    "sinks": ScoreRule(0.1, has_sinks=True),
}
TYPES = (torch.float32, torch.float16, torch.bfloat16)


def refusal(name: str, use: AttentionUse) -> str | None:
    return limit(BACKENDS[name], use)


def matrix() -> str:
    """Two Markdown tables: where each mode runs over keys and values by heads and over latent rows, and what each
    backend takes."""
    lines = ["| backend | K/V heads | latent rows |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {_modes(name, Shape())} | {_modes(name, LATENT)} |" for name in BACKENDS]
    lines += [
        "",
        "| backend | page sizes | head dims | query heads per KV head | types | windows, soft caps, sinks | FP8 KV |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [f"| `{name}` | {' | '.join(_facts(name))} |" for name in BACKENDS]
    return "\n".join(lines)


def refusals() -> str:
    """Return what each backend refuses, in the words of a refused start, as a Markdown list."""
    return "\n".join(f"- `{name}`: {'; '.join(_refusals(name)) or 'nothing'}" for name in BACKENDS)


def _modes(name: str, shape: Shape) -> str:
    """Places and the modes that run there, those that run in most places first."""
    modes: dict[str, list[str]] = {}
    for work in WORKS:
        places = _places(name, [use_of(work, shape, *place) for place in PLACES.values()])
        modes.setdefault(places, []).append(work.name)
    most = max((places for places in modes if places != "no"), key=lambda places: len(modes[places]))
    rest = [f"{', '.join(names)}: {places}" for places, names in modes.items() if places != most]
    mark = " (not run on a device)" if (name, shape.layout.kind) in UNTRIED else ""
    return "; ".join([most, *rest]) + mark


def _places(name: str, uses: list[AttentionUse]) -> str:
    able = [place for place, use in zip(PLACES, uses, strict=True) if refusal(name, use) is None]
    gpus = list(PLACES)[1:]
    return "CPU, GPUs" if able == list(PLACES) else "GPUs" if able == gpus else ", ".join(able) or "no"


def _home() -> AttentionUse:
    """A use that every backend takes: decoding on an H200."""
    return use_of(next(work for work in WORKS if work.mode is Mode.DECODE), Shape())


def _facts(name: str) -> list[str]:
    home = _home()
    heads = {group: group * home.num_kv_heads for group in GROUPS}
    return [
        _able(name, {size: dataclasses.replace(home, page_size=size) for size in PAGE_SIZES}),
        _able(name, {dim: dataclasses.replace(home, head_dim=dim) for dim in HEAD_DIMS}),
        _able(name, {group: dataclasses.replace(home, num_heads=count) for group, count in heads.items()}),
        _able(name, {str(t).removeprefix("torch."): dataclasses.replace(home, dtype=t) for t in TYPES}),
        _able(name, {what: dataclasses.replace(home, scores=(rule,)) for what, rule in RULES.items()}) or "no",
        "no" if refusal(name, dataclasses.replace(home, kv_dtype=FP8)) else "yes",
    ]


def _able(name: str, uses: dict[object, AttentionUse]) -> str:
    able = [str(value) for value, use in uses.items() if refusal(name, use) is None]
    return "all" if len(able) == len(uses) else ", ".join(able)


def _refusals(name: str) -> list[str]:
    """Each reason once, in the order of the uses asked."""
    home = _home()
    latent = dataclasses.replace(home, num_kv_heads=1, head_dim=576, layout="latent rows", value_dim=512)
    asked = [use_of(work, Shape(), *place) for work in WORKS for place in PLACES.values()]
    asked += [
        dataclasses.replace(home, page_size=1),
        dataclasses.replace(home, head_dim=80),
        dataclasses.replace(home, head_dim=512),
        dataclasses.replace(home, num_heads=64 * home.num_kv_heads),
        dataclasses.replace(home, dtype=torch.float32),
        dataclasses.replace(home, window=1024),
        *(dataclasses.replace(home, scores=(rule,)) for rule in RULES.values()),
        *(dataclasses.replace(latent, scores=(rule,)) for rule in RULES.values()),
        dataclasses.replace(home, scores=(ScoreRule(0.1), ScoreRule(0.2))),
        dataclasses.replace(home, kv_dtype=FP8),
        dataclasses.replace(home, kv_dtype=FP8, device=GPU_8),
        latent,
        dataclasses.replace(latent, mode=Mode.PREFILL),
        dataclasses.replace(latent, device=GPU_10),
        dataclasses.replace(latent, head_dim=24 + 64, value_dim=24),
        dataclasses.replace(latent, device=GPU_10, page_size=64, head_dim=24 + 64, value_dim=24),
        dataclasses.replace(latent, device=GPU_10, page_size=64, dtype=torch.float16),
        dataclasses.replace(latent, device=GPU_10, page_size=64, num_heads=96),
        dataclasses.replace(latent, device=GPU_12, page_size=64, num_heads=16),
        dataclasses.replace(latent, device=GPU_12, page_size=64, num_heads=128, mode=Mode.VERIFY, tree=True),
        dataclasses.replace(latent, head_dim=1024 + 64, value_dim=1024),
    ]
    reasons = [refusal(name, use) for use in asked]
    return list(dict.fromkeys(reason for reason in reasons if reason is not None))


if __name__ == "__main__":
    print(refusals() if "--refusals" in sys.argv else matrix())
