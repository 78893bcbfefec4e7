"""M-RoPE positions (arXiv 2409.12191, section 2.1; arXiv 2502.13923): a text token has three equal positions, a token
of an image those of its frame, row and column. Text after an image continues after the largest of its positions."""

from collections.abc import Sequence

import numpy as np

from aerie.workers.prompt_inputs import Image, Int32s


def mrope_positions(num_tokens: int, images: Sequence[Image], merge_size: int) -> Int32s:
    """Return [3, num_tokens] int32.

    images: whole images of one frame, in order.
    merge_size: see `aerie.workers.vision.config.VisionConfig`.
    """
    positions = np.empty((3, num_tokens), np.int32)
    done = first = 0  # tokens with positions, and the next one's position
    for image in images:
        count = image.start - done
        positions[:, done : image.start] = np.arange(first, first + count)
        first += count
        rows, columns = image.grid[1] // merge_size, image.grid[2] // merge_size
        assert image.num_rows == rows * columns, "a whole image"
        at = positions[:, image.start : image.end]
        at[0] = first
        at[1] = first + np.repeat(np.arange(rows), columns)
        at[2] = first + np.tile(np.arange(columns), rows)
        first += max(rows, columns)
        done = image.end
    positions[:, done:] = np.arange(first, first + num_tokens - done)
    return positions
