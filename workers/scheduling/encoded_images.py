"""`EncodedImages`: which images' embeddings the ranks keep.

The scheduler and every rank have one. All see the same images in the order of the plans, so they agree without a
message, and a plan contains the pixels of an image only if the ranks have not kept its embeddings. No torch.
"""

from collections import OrderedDict


class EncodedImages:
    """Images in the order of their last use. The newest one is kept even if it exceeds `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes: OrderedDict[bytes, int] = OrderedDict()
        self._total = 0

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._bytes

    def use(self, digest: bytes, num_bytes: int) -> list[bytes]:
        """Use an image, with embeddings of `num_bytes`. Return the digests of those that are no longer kept."""
        if digest in self._bytes:
            self._bytes.move_to_end(digest)
            return []
        self._bytes[digest] = num_bytes
        self._total += num_bytes
        dropped = []
        while self._total > self._max_bytes and len(self._bytes) > 1:
            oldest, size = self._bytes.popitem(last=False)
            self._total -= size
            dropped.append(oldest)
        return dropped

    def clear(self) -> None:
        """Forget all images, because the ranks have been replaced."""
        self._bytes.clear()
        self._total = 0
