"""Arithmetic of blocks: how tensors are cut into programs."""


def cdiv(x: int, size: int) -> int:
    """How many blocks of `size` hold x."""
    return -(-x // size)


def next_power_of_2(x: int) -> int:
    """The least power of two that is not below x."""
    return 1 << (x - 1).bit_length() if x > 0 else 0
