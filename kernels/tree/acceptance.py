"""Acceptance: finds the drafted nodes that equal the target's choices, and commits them to the slots.

The target chooses a token after every node of the tree: greedily, or by sampling with noise that depends only on seed
and position (`aerie.workers.sampling`). A node is accepted if its parent is accepted and it equals the token
chosen after its parent. So the emitted tokens are those of non-speculative decoding: a seed gives the same text with
and without speculation, alone and in a batch. All ranks accept the same tokens without an exchange.

Rejection sampling, which is optimal for one drafted token, would accept slightly more. Tokens per round of the embedded
pair, chains of three (exact expectations): 2.50 instead of 2.58 at temperature 1.0, 2.54 instead of 2.59 at 0.7, 2.90
instead of 2.93 at 0.7 with top-k 20 and top-p 0.8.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aerie.kernels.contracts import check_slots
from aerie.kernels.kv.mask_bits import MASK_BITS, MAX_NODES
from aerie.kernels.kv.tree_masks import seen_columns
from aerie.kernels.operation import Implementation, on_gpu, operation
from aerie.kernels.sampling.choose import gumbel_noise
from aerie.kernels.slots.commit import Commit, CommitTables, commit
from aerie.kernels.tree.nodes import NO_TOKEN, Tree


@dataclass(frozen=True)
class Accepted:
    """The accepted path of each request.

    path: [B, D + 1] int64 accepted nodes by depth, then 0.
    num_drafts: [B] int64 accepted draft tokens.
    tokens: [B, D + 1] int64 emitted tokens: accepted drafts, then the target's choice after the last; num_drafts + 1
        are valid.
    """

    path: Tensor
    num_drafts: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class Committed:
    """A committed path, and its rows.

    path_rows: [B, D + 1] int64, index of each of the path's nodes among all B * W rows.
    newest: [B] int64, index among the B * (D + 1) entries of `path_rows` after which the newest token was chosen.
    newest_position: [B] int32, that row's KV position.
    reported: [B] int64 accepted drafts for statistics; -1 if none were verified.
    """

    accepted: Accepted
    commit: Commit
    path_rows: Tensor
    newest: Tensor
    newest_position: Tensor
    reported: Tensor


def _check(
    slots: Tensor,
    tree: Tree,
    chosen: Tensor,
    tables: CommitTables,
    max_depth: int,
    synthetic_length: float | None = None,
) -> None:
    assert chosen.dim() == 2 and chosen.dtype == torch.int64 and chosen.is_contiguous() and chosen.shape[1] <= MAX_NODES
    check_slots(slots)
    assert slots.shape == chosen.shape[:1]
    for field in tree.fields:
        assert field.shape == chosen.shape and field.dtype == torch.int64
        assert field.stride(1) == 1 or chosen.shape[1] == 1
        assert field.stride(0) == tree.tokens.stride(0) or chosen.shape[0] <= 1


@operation(Implementation("triton", "aerie.kernels.tree.acceptance_triton:accept_commit", on_gpu), contract=_check)
def accept_commit(
    slots: Tensor,
    tree: Tree,
    chosen: Tensor,
    tables: CommitTables,
    max_depth: int,
    synthetic_length: float | None = None,
) -> Committed:
    """Accept the path of nodes that the target chose, and commit its tokens to the slots.

    slots             [B] int64; padding rows have the padding slot
    tree              [B, W] per field, W <= MAX_NODES, no deeper than max_depth
    chosen            [B, W] int64, the target's token after each node, contiguous; below 0: its logits are not finite
    tables            seq_len, bonus, finished and output_counts of `slots` are written
    synthetic_length  None, or the mean length of rounds (`accept_synthetic`)
    ->                [B, max_depth + 1] of the paths
    """
    if chosen.shape[1] == 1 and max_depth == 0:
        return _commit_roots(slots, chosen, tables)
    running, length = ~tables.finished[slots], tables.seq_len[slots]
    if synthetic_length is None:
        accepted = accept(tree, chosen, running, max_depth)
    else:
        seed = tables.seed[slots]
        accepted = accept_synthetic(tree, chosen, running, max_depth, synthetic_length, seed, length.long())
    done = Commit(accepted.tokens, *commit(slots, accepted.tokens, accepted.num_drafts + 1, tables))
    return committed(tree, replace(accepted, tokens=done.tokens), done, length)


def _commit_roots(slots: Tensor, chosen: Tensor, tables: CommitTables) -> Committed:
    """Do `accept_commit` for rounds without drafts: chosen is [B, 1], and nothing is compared."""
    length, nothing = tables.seq_len[slots], torch.zeros_like(chosen)
    tokens = chosen.clone()
    done = Commit(tokens, *commit(slots, tokens, torch.ones_like(slots), tables))
    row, num_drafts = torch.arange(slots.shape[0], device=slots.device), nothing[:, 0]
    accepted = Accepted(nothing, num_drafts, tokens)
    return Committed(
        accepted,
        done,
        path_rows=row.unsqueeze(1),
        newest=row,
        newest_position=length,
        reported=torch.full_like(slots, -1),
    )


def has_drafts(tree: Tree) -> Tensor:
    """Return [B] bool: whether a tree has nodes besides its root."""
    if tree.tokens.shape[1] == 1:
        return torch.zeros_like(tree.tokens[:, 0], dtype=torch.bool)
    return tree.tokens[:, 1] != NO_TOKEN


def committed(tree: Tree, accepted: Accepted, done: Commit, length: Tensor) -> Committed:
    """Return the committed path. length: [B] int32, committed KV tokens before this round."""
    batch, columns = accepted.path.shape
    row = torch.arange(batch, device=length.device)
    verified = has_drafts(tree) & (done.counts > 0)
    width = tree.tokens.shape[1]
    depth = (done.counts - 1).clamp_min(0)
    return Committed(
        accepted,
        done,
        path_rows=accepted.path + width * row.unsqueeze(1),
        newest=row * columns + depth,
        newest_position=(length + depth).int(),
        reported=torch.where(verified, accepted.num_drafts, -1),
    )


def accept(tree: Tree, chosen: Tensor, enabled: Tensor, max_depth: int) -> Accepted:
    """Compare trees with the target's choices chosen [B, W] int64. enabled: [B] bool; False accepts no draft.

    A node is accepted if its ancestors' bits are all among the matching nodes, so no walk over the tree is needed.
    """
    width = tree.tokens.shape[1]
    node = torch.arange(width, device=chosen.device)
    matches = tree.tokens == chosen.gather(1, tree.parents)
    matches = (matches & enabled.unsqueeze(1)) | (node == 0)
    if width > MASK_BITS:
        accepted = ~(seen_columns(tree.masks, width) & ~matches.unsqueeze(1)).any(2)
    else:
        matching = (matches.long() << node).sum(1, keepdim=True)
        accepted = (tree.masks & matching) == tree.masks
    return _along_path(tree, chosen, accepted, max_depth)


def accept_synthetic(
    tree: Tree, chosen: Tensor, enabled: Tensor, max_depth: int, length: float, seed: Tensor, position: Tensor
) -> Accepted:
    """Accept a given number of drafts, regardless of the tokens: floor(length) - 1, and one more with probability
    length - floor(length). So 1 + accepted drafts has the mean `length` (as vLLM's `synthetic_acceptance_length`).

    seed, position: [B] int64, for the draw.
    """
    certain = int(length - 1)
    uniform = torch.exp(-torch.exp(-gumbel_noise(seed, position, torch.full_like(seed, -1))))
    wanted = certain + (uniform < length - 1 - certain).long()
    wanted = torch.where(enabled & has_drafts(tree), wanted, 0)
    node = torch.arange(tree.tokens.shape[1], device=chosen.device)
    # the first node of the wanted depth, or of the deepest level with tokens
    depth = torch.minimum(torch.where(tree.tokens != NO_TOKEN, tree.depths, 0), wanted.unsqueeze(1))
    target = (depth * tree.tokens.shape[1] - node).argmax(1, keepdim=True)
    seen = seen_columns(tree.masks, len(node))
    accepted = seen.gather(1, target.unsqueeze(2).expand(-1, -1, len(node))).squeeze(1)
    return _along_path(tree, chosen, accepted, max_depth)


def _along_path(tree: Tree, chosen: Tensor, accepted: Tensor, max_depth: int) -> Accepted:
    """Return the accepted nodes [B, W] bool, at most one per depth, in order of depth."""
    batch, width = accepted.shape
    node = torch.arange(width, device=accepted.device).expand(batch, width)
    path = torch.zeros((batch, max_depth + 2), dtype=torch.int64, device=accepted.device)
    path.scatter_(1, torch.where(accepted, tree.depths, max_depth + 1), node)
    path = path[:, : max_depth + 1].contiguous()
    num_drafts = torch.where(accepted, tree.depths, 0).amax(1)
    below = tree.tokens.gather(1, path.roll(-1, dims=1)).clamp_min(0)
    column = torch.arange(max_depth + 1, device=accepted.device)
    tokens = torch.where(column < num_drafts.unsqueeze(1), below, chosen.gather(1, path))
    return Accepted(path, num_drafts, tokens)
