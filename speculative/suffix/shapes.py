"""Tree shapes of an engine whose drafts are copied from the requests' own text."""

from workers.config import PLAIN, RoundShape, RoundShapes


def suffix_shape(num_tokens: int) -> RoundShape:
    """Return the shape of a chain of `num_tokens` drafts. Drafting writes no KV."""
    return RoundShape(f"suffix/{num_tokens}", num_tokens + 1, num_tokens + 1, draft_tokens=0)


def suffix_shapes(num_tokens: int, adaptive: bool) -> RoundShapes:
    """Return the shapes of non-speculative decoding and of chains of `num_tokens` drafts; if adaptive, also of a half
    and a quarter of them. If num_tokens is 2**n - 1, so are these."""
    fewer = {(num_tokens - 1) // 2, (num_tokens - 3) // 4} if adaptive else set()
    between = tuple(suffix_shape(number) for number in sorted(fewer) if number > 0)
    return RoundShapes(
        (PLAIN, *between, suffix_shape(num_tokens)),
        default=1 + len(between),
        adaptive=adaptive,
        keeps_tokens=True,
        model_free=True,
        drafted_by="suffix",
    )
