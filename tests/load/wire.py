"""A link between two namespaces made of two tap devices: this process carries the frames, late and not all of them.

    python -m tests.load.wire NAMESPACE:DEVICE NAMESPACE:DEVICE     # then lines "DELAY_MS LOSS" on stdin

Says "ready" once, and "set" after each of these lines.

Not every kernel has `tc netem`; every one that has tap devices can do this. Carries some 10,000 frames a second, each
after its own delay, in order. Ends with its stdin.
"""

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_FRAME = 65536
_MAX_QUEUED = 20_000


def open_tap(namespace: str, device: str) -> int:
    """A descriptor of a new tap device in the namespace. This thread stays in it."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as handle:
        if libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TAP | _IFF_NO_PI))
    return tap


def carry(taps: list[int], orders: int) -> None:
    """Until `orders` ends."""
    other = {taps[0]: taps[1], taps[1]: taps[0]}
    delay_s = loss = 0.0
    queue: list[tuple[float, int, int, bytes]] = []
    rng = random.Random(0)
    number = 0
    while True:
        wait_s = max(0.0, queue[0][0] - time.monotonic()) if queue else None
        ready, _, _ = select.select([*taps, orders], [], [], wait_s)
        for tap in ready:
            if tap == orders:
                lines = os.read(orders, 4096).decode().splitlines()
                if not lines:
                    return
                first, second = lines[-1].split()
                delay_s, loss = float(first) / 1000, float(second)
                print("set", flush=True)
                continue
            due_s = time.monotonic() + delay_s
            for frame in _frames(tap):
                if rng.random() >= loss and len(queue) < _MAX_QUEUED:
                    number += 1
                    heapq.heappush(queue, (due_s, number, other[tap], frame))
        now_s = time.monotonic()
        while queue and queue[0][0] <= now_s:
            _, _, tap, frame = heapq.heappop(queue)
            _send(tap, frame)


def _frames(tap: int) -> list[bytes]:
    found: list[bytes] = []
    try:
        while len(found) < 64:
            found.append(os.read(tap, _FRAME))
    except OSError:  # nothing more, or the device is down
        pass
    return found


def _send(tap: int, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # full, or down: lost, as on any link
        os.write(tap, frame)


def main() -> None:
    taps = [open_tap(*end.split(":")) for end in sys.argv[1:3]]
    print("ready", flush=True)
    carry(taps, sys.stdin.fileno())


if __name__ == "__main__":
    main()
