"""Hostile pictures leave no memory behind, and do not delay other requests of the process."""

import asyncio
import io
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from PIL import Image as Picture

from aerie.workers.structured_output.mask_process.template_process import template
from tests.bench.host.memory_growth import own_bytes
from tests.cluster.http.requests.test_images import bomb, chat, edge
from tests.support.edge_client import CHAT, until
from tests.support.fake_engine import FakeEngine, says
from tests.support.targets.image_models import add_tokenizer, file_of, make_image_model, picture

MAX_GROWTH = 16 << 20  # bytes; one decoded bomb has 100 MB
MAX_BUSY_S = 0.25  # processor seconds of the event loop at a time; a bomb's decoding takes several times that


def gif_of(num_frames: int) -> bytes:
    """A GIF of 8 x 8 pixels a frame, built of one frame's blocks, because PIL takes a minute to write it."""
    out = io.BytesIO()
    frames = [Picture.new("P", (8, 8), color) for color in (1, 2)]
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:], duration=10)
    whole = out.getvalue()
    last = whole.rindex(b"\x21\xf9\x04")  # the second frame's graphic control extension
    return whole[:last] + whole[last:-1] * num_frames + whole[-1:]


def pictures() -> Iterator[tuple[bytes, int]]:
    """Yield files, and the status of their answers."""
    photo = picture(1, 300, 200)
    yield gif_of(10_000), 200
    yield file_of(Picture.new("RGB", (5700, 5700))), 200  # 97 MB of a file of 100 KB
    yield bomb(5700, 5700, zlib.compress(bytes(1 << 24))), 400
    yield bomb(60000, 60000), 400
    yield file_of(photo, "JPEG")[:4000], 400
    yield file_of(Picture.new("RGB", (50000, 1))), 400
    yield b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>", 400
    for orientation in range(1, 9):
        exif = Picture.Exif()
        exif[0x0112] = orientation
        yield file_of(photo, "JPEG", exif=exif.tobytes()), 200
    yield file_of(photo, "JPEG", exif=b"Exif\0\0" + b"\xff" * 60000), 200  # damaged EXIF is ignored


def pss_bytes() -> int:
    """Memory of this process, of the one that forks decoders, and of these."""
    forking = psutil.Process(template("images")._process.pid)  # type: ignore[union-attr]
    return sum(own_bytes(each.pid) for each in (psutil.Process(), forking, *forking.children(True)))


async def busiest_s(stop: asyncio.Event) -> float:
    """Return the most processor seconds that this thread used between two turns of a task."""
    busiest, last = 0.0, time.thread_time()
    while not stop.is_set():
        await asyncio.sleep(0.005)
        busiest, last = max(busiest, time.thread_time() - last), time.thread_time()
    return busiest


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
async def test_hostile_pictures_leave_no_memory_and_delay_nobody(tmp_path: Path) -> None:
    make_image_model(tmp_path, "qwen2_5_vl")
    add_tokenizer(tmp_path)
    files = list(pictures())

    async def sent(client: httpx.AsyncClient) -> float:
        stop = asyncio.Event()
        watched = asyncio.create_task(busiest_s(stop))
        replies = await asyncio.gather(*(client.post(CHAT, json=chat("see", data)) for data, _ in files))
        stop.set()
        for reply, (data, status) in zip(replies, files, strict=True):
            assert reply.status_code == status, (data[:20], reply.text)
        return await watched

    async with edge(tmp_path, FakeEngine(says("ok"))) as client:
        await sent(client)  # imports, pools and caches
        pid = str(template("images")._process.pid)  # type: ignore[union-attr]
        children = Path(f"/proc/{pid}/task/{pid}/children")
        await until(lambda: not children.read_text().split())
        before = pss_bytes()
        assert min([await sent(client) for _ in range(3)]) < MAX_BUSY_S
        await until(lambda: not children.read_text().split())
        assert pss_bytes() - before < MAX_GROWTH
