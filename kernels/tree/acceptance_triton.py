# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The kernel of `acceptance`: one launch instead of about 45; one program of one warp per request."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.kv.mask_bits import MASK_BITS
from aerie.kernels.sampling.gumbel_triton import mix
from aerie.kernels.slots.commit import Commit, CommitTables
from aerie.kernels.slots.commit_triton import count_output, counting_arguments, settle
from aerie.kernels.slots.finish import FINISH_LENGTH, FINISH_NOT_FINITE, FINISH_STOP
from aerie.kernels.tree.acceptance import Accepted, Committed
from aerie.kernels.tree.nodes import Tree


@triton.jit
def _synthetic(token, depth, mask, node, inside, wanted, W: tl.constexpr, SPANS: tl.constexpr):
    """Return the path to the first node of the wanted depth, or of the deepest level with tokens."""
    depth = tl.where(token >= 0, depth, 0)
    key = tl.where(inside, tl.minimum(depth, wanted) * W - node, -W)
    chosen_mask = tl.sum(tl.where(node == tl.argmax(key, 0), mask, 0), 0)
    if SPANS:
        number = chosen_mask & 0xFFFF
        return ((mask & 0xFFFF) <= number) & (number < ((mask >> 16) & 0xFFFF))
    return (chosen_mask >> node & 1) > 0


@triton.jit
def _accept_commit(
    token_ptr,
    parent_ptr,
    depth_ptr,
    mask_ptr,
    tree_stride,
    chosen_ptr,
    slot_ptr,
    seq_len_ptr,
    bonus_ptr,
    bonus_stride,
    max_len_ptr,
    max_len_stride,
    finished_ptr,
    finished_stride,
    stop_ptr,
    output_count_ptr,
    vocab_size,
    shapes_ptr,
    shapes_stride,
    seed_ptr,
    seed_stride,
    certain,
    share,
    path_ptr,
    out_ptr,
    accepted_ptr,
    count_ptr,
    finish_ptr,
    row_ptr,
    newest_ptr,
    position_ptr,
    reported_ptr,
    W: tl.constexpr,
    W_PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    STOPS: tl.constexpr,
    STOP: tl.constexpr,
    LENGTH: tl.constexpr,
    NOT_FINITE: tl.constexpr,
    SYNTHETIC: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    SPANS: tl.constexpr,
):
    """Accept a path of one request's tree, and commit its tokens to the slot.

    token_ptr, parent_ptr, depth_ptr, mask_ptr: [requests, W], fields of `Tree`, tree_stride between requests.
    chosen_ptr: [requests, W] token that the target chose after each node; negative if its logits were not finite.
    slot_ptr: [requests] int64.
    seq_len_ptr .. finished_stride: tables by slot, read and written, see `aerie.kernels.slots.commit_triton.settle`.
    certain, share: with SYNTHETIC, accepted drafts of every round, and the probability of one more.
    W: nodes of a tree, padded to W_PADDED.
    COLUMNS: nodes of the longest path.
    STOPS: stop ids of a slot.
    STOP, LENGTH, NOT_FINITE: values of the finish reason.
    DOUBLINGS: steps of pointer doubling that reach the deepest node.
    SPANS: masks are spans of the tree's numbering, for trees of more than MASK_BITS nodes; else bits.
    The other pointers and strides are those of `accept_commit`'s tensors.
    """
    b = tl.program_id(0)
    slot = tl.load(slot_ptr + b)
    node = tl.arange(0, W_PADDED)
    inside = node < W
    token = tl.load(token_ptr + b * tree_stride + node, mask=inside, other=-1)
    parent = tl.load(parent_ptr + b * tree_stride + node, mask=inside, other=0)
    depth = tl.load(depth_ptr + b * tree_stride + node, mask=inside, other=0)
    mask = tl.load(mask_ptr + b * tree_stride + node, mask=inside, other=-1)
    chosen = tl.load(chosen_ptr + b * W + node, mask=inside, other=-1)
    wanted = tl.load(chosen_ptr + b * W + parent, mask=inside, other=-1)
    was_finished = tl.load(finished_ptr + slot * finished_stride).to(tl.int1)
    drafted = tl.max(tl.where(node == 1, token, -1), 0) >= 0
    enabled = drafted & (was_finished == 0)

    length = tl.load(seq_len_ptr + slot).to(tl.int64)
    matches = ((token == wanted) & enabled & inside) | (node == 0)
    if SPANS:
        accepted, up = matches.to(tl.int32), tl.where(inside, parent, 0).to(tl.int32)
        for _ in tl.static_range(DOUBLINGS):  # the root is its own parent
            accepted &= tl.gather(accepted, up, 0)
            up = tl.gather(up, up, 0)
        accepted = (accepted > 0) & inside
    else:
        one = tl.full([W_PADDED], 1, tl.int64)
        matching = tl.sum(tl.where(matches, one << node.to(tl.int64), 0), 0)
        accepted = ((mask & matching) == mask) & inside
    if SYNTHETIC:
        seed = tl.load(seed_ptr + slot * seed_stride)
        hashed = mix(mix(seed + length * -7046029254386353131) + 7046029254386353131)
        uniform = 1.0 - ((hashed >> 32 & 0xFFFFFFFF).to(tl.float32) + 0.5) / 4294967296.0
        wanted = tl.where(enabled, certain + (uniform < share).to(tl.int64), 0)
        accepted = _synthetic(token, depth, mask, node, inside, wanted, W, SPANS) & inside
    num_drafts = tl.max(tl.where(accepted, depth, 0), 0)

    max_len = tl.load(max_len_ptr + slot * max_len_stride)
    stops = tl.load(stop_ptr + slot * STOPS + tl.arange(0, STOPS))
    count = tl.minimum(num_drafts + 1, max_len - length - 1)
    first_stop = count * 0 + COLUMNS
    last = count * 0
    for j in tl.static_range(COLUMNS):
        here = accepted & (depth == j)
        index = tl.sum(tl.where(here, node, 0), 0).to(tl.int64)
        below = tl.maximum(tl.sum(tl.where(accepted & (depth == j + 1), token, 0), 0), 0)
        token_or_none = tl.where(j < num_drafts, below, tl.sum(tl.where(node == index, chosen, 0), 0))
        emitted = tl.maximum(token_or_none, 0)
        tl.store(path_ptr + b * COLUMNS + j, index)
        tl.store(row_ptr + b * COLUMNS + j, b * W + index)
        tl.store(out_ptr + b * COLUMNS + j, emitted)
        # the first stop token is emitted, too

        valid = (j < count) & (first_stop == COLUMNS) & (was_finished == 0)
        count_output(slot, emitted, valid, output_count_ptr, vocab_size, shapes_ptr, shapes_stride)
        is_stop = tl.max((stops == emitted).to(tl.int32), 0) > 0
        first_stop = tl.where(is_stop & (first_stop == COLUMNS), j, first_stop)
        end = tl.where(first_stop < count, first_stop + 1, count)
        last = tl.where(j == end - 1, token_or_none, last)
    count, finish = settle(
        slot,
        length,
        count,
        first_stop,
        last,
        seq_len_ptr,
        bonus_ptr,
        bonus_stride,
        max_len_ptr,
        max_len_stride,
        finished_ptr,
        finished_stride,
        STOP,
        LENGTH,
        NOT_FINITE,
    )
    tl.store(accepted_ptr + b, num_drafts)
    tl.store(count_ptr + b, count)
    tl.store(finish_ptr + b, finish)
    tl.store(reported_ptr + b, tl.where(drafted & (count > 0), num_drafts, -1))
    depth_of_newest = tl.maximum(count - 1, 0)
    tl.store(newest_ptr + b, (b * COLUMNS + depth_of_newest).to(tl.int64))
    tl.store(position_ptr + b, (length + depth_of_newest).to(tl.int32))


def accept_commit(
    slots: Tensor,
    tree: Tree,
    chosen: Tensor,
    tables: CommitTables,
    max_depth: int,
    synthetic_length: float | None = None,
) -> Committed:
    """Implement `aerie.kernels.tree.acceptance.accept_commit`: accept the path of nodes that the target chose, and
    commit its tokens to the slots.

    chosen: the target's token after each node.
    synthetic_length: accept paths of this mean length, whatever the target chose (`accept_synthetic`); None: do not.
    """
    batch, width, columns = chosen.shape[0], chosen.shape[1], max_depth + 1
    fields = tree.fields
    path, tokens, rows = torch.empty((3, batch, columns), dtype=torch.int64, device=chosen.device).unbind(0)
    facts = torch.empty((5, batch), dtype=torch.int64, device=chosen.device)
    num_drafts, counts, finish, newest, reported = facts.unbind(0)
    position = torch.empty(batch, dtype=torch.int32, device=chosen.device)
    certain = int(synthetic_length - 1) if synthetic_length is not None else 0
    share = synthetic_length - 1 - certain if synthetic_length is not None else 0.0
    finished = tables.finished.view(torch.int8)
    _accept_commit[(batch,)](
        *fields,
        fields[0].stride(0),
        chosen,
        slots,
        tables.seq_len,
        tables.bonus,
        tables.bonus.stride(0),
        tables.max_len,
        tables.max_len.stride(0),
        finished,
        finished.stride(0),
        tables.stop_ids,
        *counting_arguments(tables.output_counts, tables.shapes_logits),
        tables.seed,
        tables.seed.stride(0),
        certain,
        share,
        path,
        tokens,
        num_drafts,
        counts,
        finish,
        rows,
        newest,
        position,
        reported,
        W=width,
        W_PADDED=triton.next_power_of_2(width),
        COLUMNS=columns,
        STOPS=tables.stop_ids.shape[1],
        STOP=FINISH_STOP,
        LENGTH=FINISH_LENGTH,
        NOT_FINITE=FINISH_NOT_FINITE,
        SYNTHETIC=synthetic_length is not None,
        DOUBLINGS=max_depth.bit_length(),
        SPANS=width > MASK_BITS,
        num_warps=1,
    )
    accepted, commit = Accepted(path, num_drafts, tokens), Commit(tokens, counts, finish)
    return Committed(accepted, commit, path_rows=rows, newest=newest, newest_position=position, reported=reported)
