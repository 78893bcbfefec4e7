"""The nodes' network does what the scenarios believe: it connects, delays, loses and cuts. In a sandbox of its own, so
that nothing of it stays."""

import pytest

from tests.load.sandbox import run_inside, unavailable

if __name__ != "__main__":
    pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "it can")


def test_link_delays_loses_and_cuts() -> None:
    assert run_inside(["-m", "tests.load.test_network"]) == 0


def _inside() -> None:
    import subprocess
    import sys
    import time

    from tests.load.network import address, namespace, network

    echo = (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('', 7)); print(flush=True)\n"
        "while True: s.sendto(*s.recvfrom(100))"
    )

    def answered(node: int, count: int, pause_s: float = 0.002, limit_s: float = 0.5) -> list[float]:
        """Round trips in seconds of those of `count` datagrams that came back."""
        import socket

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
            own.settimeout(limit_s)
            sent = {}
            for number in range(count):
                sent[str(number).encode()] = time.perf_counter()
                own.sendto(str(number).encode(), (address(node), 7))
                time.sleep(pause_s)
            trips = []
            try:
                while len(trips) < count:
                    data = own.recv(100)
                    trips.append(time.perf_counter() - sent[data])
            except TimeoutError:
                pass
            return trips

    with network() as made:
        for node, wired in ((1, False), (2, True)):
            made.add_node(node, wired)
            command = ["ip", "netns", "exec", namespace(node), sys.executable, "-c", echo]
            process = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert process.stdout is not None
            process.stdout.readline()
        for node in (1, 2):
            assert len(answered(node, 20)) == 20, f"node {node} does not answer"
        made.impair(2, 30.0, 0.0)
        (slow,) = answered(2, 1)
        assert slow > 0.06, f"twice 30 ms, and {slow * 1000:.1f} ms measured"
        made.impair(2, 0.0, 0.3)
        came = len(answered(2, 300))  # both ways: 0.49 of them; off by five standard deviations once in a million
        assert 100 < came < 195, f"{came} of 300"
        made.impair(2, 0.0, 0.0)
        for node in (1, 2):
            made.set_link(node, up=False)
            assert not answered(node, 3), f"node {node} is cut off, and answers"
            made.set_link(node, up=True)
            assert answered(node, 50), f"node {node} was plugged in again, and does not answer"


if __name__ == "__main__":
    _inside()
