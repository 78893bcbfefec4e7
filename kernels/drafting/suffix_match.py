"""Drafts copied from a request's own text. The device has a history of each request's tokens. The newest tokens are
looked up in it, and the tokens that followed the match become a branch of the request's tree.

Prompt lookup (https://github.com/apoorvumang/prompt-lookup-decoding) and suffix decoding (arXiv 2411.04975), with a
scan in place of a suffix tree: a round reads each request's text once, 4 bytes per token, and updates no tree.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from aerie.kernels.contracts import check_slots
from aerie.kernels.operation import Implementation, on_gpu, on_host, operation
from aerie.kernels.tree.nodes import NO_TOKEN, Tree, check_trees


@dataclass(frozen=True)
class MatchLimits:
    """Limits of match lengths, in tokens.

    shortest: shorter matches do not count.
    longest: longer matches count as this long.
    """

    shortest: int
    longest: int


def _check_slot_chains(slots: Tensor, chains: Tensor) -> None:
    check_slots(slots)
    assert chains.dim() == 2 and chains.dtype == torch.int64 and chains.is_contiguous()


def _check_tokens(
    history: Tensor, slots: Tensor, length: Tensor, tokens: Tensor, counts: Tensor, chains: Tensor
) -> None:
    _check_slot_chains(slots, chains)
    assert history.dtype == length.dtype == torch.int32 and history.is_contiguous() and length.is_contiguous()
    assert tokens.shape[:1] == counts.shape == length.shape == slots.shape and tokens.dtype == torch.int64
    assert tokens.is_contiguous() and counts.is_contiguous()


def _check_history(
    history: Tensor, slots: Tensor, seq_len: Tensor, limits: MatchLimits, chains: Tensor, max_tokens: int
) -> None:
    _check_slot_chains(slots, chains)
    assert history.dtype == seq_len.dtype == torch.int32 and history.is_contiguous() and seq_len.is_contiguous()
    assert limits.shortest >= 1


def _check_chains(trees: Tree, slots: Tensor, chains: Tensor, first: int) -> None:
    _check_slot_chains(slots, chains)
    check_trees(trees)
    assert first >= 1 and first + chains.shape[1] <= trees.tokens.shape[1] <= 63


@operation(
    Implementation("triton", "aerie.kernels.drafting.suffix_match_triton:record_tokens", on_gpu),
    Implementation("numpy", "aerie.kernels.drafting.suffix_match_host:record_tokens", on_host),
    contract=_check_tokens,
)
def record_tokens(
    history: Tensor, slots: Tensor, length: Tensor, tokens: Tensor, counts: Tensor, chains: Tensor
) -> Tensor:
    """Append emitted tokens to the history, and compare them with the chains that were proposed for them.

    history  [S, T] int32, contiguous, written: tokens of each slot by position
    slots    [B] int64; all padding rows name the padding slot
    length   [B] int32: committed KV tokens before this step: the position of the previous newest token, which `tokens`
             follow. length + M < T
    tokens   [B, M] int64, contiguous
    counts   [B] int64, 0 to M: how many of them are valid
    chains   [S, K] int64, contiguous: tokens proposed for these positions; NO_TOKEN where there are none
    ->       [B] int64: number of leading valid tokens that equal the chain's; -1 without a chain
    """
    column = torch.arange(tokens.shape[1], device=tokens.device)
    valid = column < counts.unsqueeze(1)
    index = slots.unsqueeze(1) * history.shape[1] + length.long().unsqueeze(1) + 1 + column
    flat = history.view(-1)
    flat[index] = torch.where(valid, tokens.int(), flat[index])
    chain, width = chains[slots], min(tokens.shape[1], chains.shape[1])
    equal = (chain[:, :width] == tokens[:, :width]) & valid[:, :width]
    return torch.where(chain[:, 0] == NO_TOKEN, -1, equal.cumprod(1).sum(1))


@operation(
    Implementation("triton", "aerie.kernels.drafting.suffix_match_triton:find_matches", on_gpu),
    Implementation("numpy", "aerie.kernels.drafting.suffix_match_host:find_matches", on_host),
    contract=_check_history,
)
def find_matches(
    history: Tensor, slots: Tensor, seq_len: Tensor, limits: MatchLimits, chains: Tensor, max_tokens: int
) -> Tensor:
    """Look up each request's newest tokens in its earlier text, and propose the tokens that followed them.

    The longest match is used; among equally long matches, the newest. If the tokens after the match reach the end of
    the text, the proposal repeats from its start.

    history     [S, T] int32, contiguous
    slots       [B] int64; all padding rows name the padding slot
    seq_len     [S] int32: committed KV tokens; a slot has one token more
    chains      [S, K] int64, contiguous; the rows of `slots` are written: NO_TOKEN without a match
    max_tokens  bound on the tokens of each slot; the reference reads no further
    ->          [B] int64: length of the match; 0 without one
    """
    own = history[slots, : min(max_tokens, history.shape[1])]
    count = seq_len[slots].long().unsqueeze(1) + 1
    column = torch.arange(own.shape[1], device=own.device)
    run, length = column < count - 1, torch.zeros_like(own)
    for back in range(limits.longest):
        wanted = own.gather(1, (count - 1 - back).clamp_min(0))
        earlier = own.roll(back, dims=1)
        run = run & (earlier == wanted) & (column >= back) & (count > back)
        length += run
    best = (length.long() << 32 | column).amax(1, keepdim=True)
    matched, at = best >> 32, best & 0xFFFFFFFF
    ahead = torch.arange(chains.shape[1], device=own.device)
    source = at + 1 + ahead % (count - 1 - at).clamp_min(1)
    is_match = matched >= limits.shortest
    following = own.gather(1, source.clamp_max(own.shape[1] - 1)).long()
    chains[slots] = torch.where(is_match, following, NO_TOKEN)
    return torch.where(is_match, matched, 0).squeeze(1)


@operation(
    Implementation("triton", "aerie.kernels.drafting.suffix_match_triton:attach_chains", on_gpu),
    Implementation("numpy", "aerie.kernels.drafting.suffix_match_host:attach_chains", on_host),
    contract=_check_chains,
)
def attach_chains(trees: Tree, slots: Tensor, chains: Tensor, first: int) -> None:
    """Add each slot's chain to its tree as a branch, in the nodes from `first` on.

    The chain shares nodes that the tree already has, so that no two children of a node are equal. Unused nodes become
    NO_TOKEN.

    trees   [S, W] per field, contiguous; nodes first to first + K - 1 of `slots` are written; W >= first + K
    slots   [B] int64; all padding rows name the padding slot
    chains  [S, K] int64, contiguous; NO_TOKEN from some column on
    first   number of nodes of the tree before this call, its root included; at least 1
    """
    chain, num_nodes = chains[slots], chains.shape[1]
    tokens, parents, depths, masks = (field[slots, :first] for field in trees.fields)
    node = torch.zeros_like(slots).unsqueeze(1)
    merged, alive = torch.zeros_like(node), torch.ones_like(node, dtype=torch.bool)
    index = torch.arange(first, device=slots.device)
    for step in range(num_nodes if first > 1 else 0):  # a root alone has no child to merge with
        token = chain[:, step : step + 1]
        hit = torch.where((parents == node) & (tokens == token) & (index > 0) & (token >= 0), index, -1)
        child = hit.amax(1, keepdim=True)
        alive = alive & (child >= 0)
        node = torch.where(alive, child, node)
        merged = merged + alive
    ahead = torch.arange(num_nodes, device=slots.device)
    source = merged + ahead
    left = torch.where(source < num_nodes, chain.gather(1, source.clamp_max(num_nodes - 1)), NO_TOKEN)
    own = ((torch.ones_like(ahead) << (ahead + 1)) - 1) << first
    branch = slice(first, first + num_nodes)
    trees.tokens[slots, branch] = left
    trees.parents[slots, branch] = torch.where(ahead == 0, node, first + ahead - 1)
    trees.depths[slots, branch] = depths.gather(1, node) + 1 + ahead
    trees.masks[slots, branch] = masks.gather(1, node) | own
