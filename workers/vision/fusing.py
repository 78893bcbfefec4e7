"""`fuse`: puts fused modules in place of those of transformers' towers whose weights are loaded.

Modules are recognised by their parts, not by the names of their classes, which differ by family and version. Each class
is compared with its fused module once, on random rows.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from aerie.kernels.norm import norm
from aerie.workers.vision.fused import Block, GatedMLP, RMSNorm, SpanAttention

_SPANS = (4, 2)  # rows of each span that modules are compared on
_TOLERANCE = 1e-3  # of the largest value; sums in float32 differ by 1e-6 of it

Build = Callable[[Any], nn.Module]


def fuse(tower: Any, in_one_launch: bool, has_values: bool = True) -> list[str]:
    """Replace RMSNorms, gated MLPs, attention and blocks within one of Qwen's towers.

    in_one_launch: see `SpanAttention`.
    has_values: whether the weights have values; without them nothing is compared.
    Returns the classes of modules of transformers that stay, though their passes take many kernels: they have other
    parts than is known here, or other results than the fused module.
    """
    activation = norm.ACTIVATIONS.get(tower.config.hidden_act)
    builds: dict[str, Build] = {"norm": RMSNorm, "attention": lambda module: SpanAttention(module, in_one_launch)}
    if activation is not None:
        builds["mlp"] = lambda module: GatedMLP(module, activation)
    first = tower.blocks[0]
    whole = _on_cpu(first) if has_values else None
    _fuse_parts(tower, builds, {}, has_values)
    kind = type(first)
    if _can_be_block(first) and (whole is None or _is_same(whole, first, Block)):
        for i, block in enumerate(tower.blocks):
            if type(block) is kind:
                tower.blocks[i] = Block(block)
    return _unfused(tower)


def _fuse_parts(parent: nn.Module, builds: Mapping[str, Build], known: dict[type, bool], has_values: bool) -> None:
    """Replace the norms, MLPs and attention of `parent`. known: whether a class of transformers has the results of its
    fused module."""
    for name, module in parent.named_children():
        build, kind = builds.get(_form_of(module)), type(module)
        if build is not None and kind not in known:
            known[kind] = not has_values or _is_same(_on_cpu(module), module, build)
        if build is not None and known[kind]:
            setattr(parent, name, build(module))
        else:
            _fuse_parts(module, builds, known, has_values)


def _form_of(module: nn.Module) -> str:
    """Return which fused module may replace one of transformers; "" if none may."""
    parts = _parts(module)
    if parts == {"gate_proj", "up_proj", "down_proj"}:
        return "mlp"
    if parts == {"qkv", "proj"} and hasattr(module, "num_heads"):
        return "attention"
    is_norm = hasattr(module, "variance_epsilon") and [name for name, _ in module.named_parameters()] == ["weight"]
    return "norm" if is_norm else ""


def _parts(module: nn.Module) -> set[str]:
    """Return the names of the children that have parameters."""
    return {name for name, child in module.named_children() if next(child.parameters(), None) is not None}


def _can_be_block(module: Any) -> bool:
    return _parts(module) == {"norm1", "norm2", "attn", "mlp"} and isinstance(module.norm2, RMSNorm)


def _on_cpu(module: nn.Module) -> Any:
    """Return a copy on the CPU in float64, for which no kernel is compiled."""
    return copy.deepcopy(module).to("cpu", torch.float64)


def _is_same(own: Any, module: nn.Module, build: Build) -> bool:
    """Compare `own`, a module of transformers of `_on_cpu`, with the fused module that `build` makes of a copy
    of `module`."""
    rows, layout = _arguments_of(own)
    rows = rows.double()
    try:
        with torch.inference_mode():
            fused = build(_on_cpu(module))
            for each in fused.modules():
                if isinstance(each, SpanAttention):
                    each.in_one_launch = False
            wanted, found = (each(rows.clone(), **layout) for each in (own, fused))
    except (AttributeError, RuntimeError, TypeError):  # other attributes, shapes or arguments
        return False
    return bool((found - wanted).abs().max() <= _TOLERANCE * wanted.abs().max())


def _arguments_of(module: Any) -> tuple[Tensor, dict[str, Any]]:
    """Return random rows and, for attention or a block, the other arguments of transformers' modules."""
    generator, num_rows = torch.Generator().manual_seed(1), sum(_SPANS)
    attention = getattr(module, "attn", module)
    if _form_of(attention) != "attention":
        size = next(module.parameters()).shape[-1]
        return torch.randn(num_rows, size, generator=generator), {}
    half = attention.qkv.out_features // (6 * attention.num_heads)
    angles = torch.randn(num_rows, half, generator=generator).repeat(1, 2)
    bounds = torch.tensor([0, _SPANS[0], num_rows], dtype=torch.int32)
    rows = torch.randn(num_rows, attention.qkv.in_features, generator=generator)
    return rows, {"cu_seqlens": bounds, "position_embeddings": (angles.cos(), angles.sin())}


def _unfused(tower: Any) -> list[str]:
    """Return the classes of transformers that have weights of their own or a fused form, and of blocks whose attention
    is not fused."""
    own = (each for each in tower.modules() if not type(each).__module__.startswith(("torch.", "aerie.")))
    left = [each for each in own if _form_of(each) or next(each.parameters(False), None) is not None]
    left += [
        each for each in tower.blocks if not isinstance(each, Block) and (_can_be_block(each) or not _attends(each))
    ]
    return sorted({type(each).__name__ for each in left})


def _attends(block: nn.Module) -> bool:
    return any(isinstance(each, SpanAttention) for each in block.modules())
