# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The kernel of `aerie.kernels.sampling.masks`."""

import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.sampling.masks import FREE

BLOCK = 4096


@triton.jit(do_not_specialize=["width", "first"])
def _apply_masks(
    x_ptr,
    x_stride,
    size,
    slot_ptr,
    index_ptr,
    word_ptr,
    num_words,
    width,
    first,
    FREE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = tl.load(index_ptr + tl.load(slot_ptr + row // width))
    if base != FREE:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        token = column + first
        inside = (column < size) & (token < 32 * num_words)
        mask = base + row % width
        word = tl.load(word_ptr + mask * num_words + token // 32, mask=inside, other=0)
        forbidden = (word >> (token % 32) & 1) == 0
        nothing = tl.full([BLOCK], float("-inf"), tl.float32).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row * x_stride + column, nothing, mask=inside & forbidden)


def apply_masks(logits: Tensor, slots: Tensor, index: Tensor, words: Tensor, first: int) -> None:
    """`aerie.kernels.sampling.masks.apply_masks`."""
    rows, size = logits.shape
    _apply_masks[(rows, triton.cdiv(size, BLOCK))](
        logits,
        logits.stride(0),
        size,
        slots,
        index,
        words,
        words.shape[1],
        rows // slots.shape[0],
        first,
        FREE=FREE,
        BLOCK=BLOCK,
        num_warps=4,
    )
