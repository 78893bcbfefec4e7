"""Images in the bodies of all APIs: what the engine receives, what is refused, and what hostile files do."""

import base64
import contextlib
import io
import struct
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image as Picture
from tokenizers import Tokenizer

from aerie.cluster.http.app import build_app
from aerie.cluster.http.requests.image_reader import ProcessReader, image_reader
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.speculative.build import EngineSpec, local_engine
from aerie.workers.config import ModelSource
from aerie.workers.scheduling.request import Request
from aerie.workers.structured_output.mask_process.template_process import template
from tests.support.edge_client import CHAT, HELLO, RESPONSES, edge_config, in_process, until
from tests.support.fake_engine import FakeEngine, says
from tests.support.targets.image_models import (
    GEMMA,
    IMAGE_TOKEN,
    ImagePrompts,
    add_tokenizer,
    file_of,
    make_image_model,
    picture,
)
from tests.workers.vision.test_images_greedy import worker_of

MESSAGES = "/v1/messages"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images")
    make_image_model(path, "qwen2_5_vl")
    add_tokenizer(path)
    return path


@contextlib.asynccontextmanager
async def edge(folder: Path, engine: FakeEngine, **changes: Any) -> AsyncIterator[httpx.AsyncClient]:
    config = edge_config(**{"image_timeout_s": 20.0} | changes)
    images = image_reader(ModelSource(path=str(folder)), config)
    assert isinstance(images, ProcessReader)
    app = build_app(config, ChatTokenizer.from_folder(folder), engine, images=images)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://edge", timeout=120) as client:
        yield client


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def chat(*parts: str | bytes, **fields: Any) -> dict[str, Any]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part), "detail": "high"}}
        for part in parts
    ]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0} | fields


def anthropic(*parts: str | bytes) -> dict[str, Any]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(part).decode()},
        }
        for part in parts
    ]
    return {"model": "tiny/model", "messages": [{"role": "user", "content": content}], "max_tokens": 6}


def responses(*parts: str | bytes) -> dict[str, Any]:
    content = [
        {"type": "input_text", "text": part}
        if isinstance(part, str)
        else {"type": "input_image", "image_url": data_url(part), "detail": "auto"}
        for part in parts
    ]
    return {"input": [{"role": "user", "content": content}], "max_output_tokens": 6, "temperature": 0}


async def test_all_apis_give_the_engine_the_images(folder: Path) -> None:
    """And the engine's answer is that of transformers to the same prompt."""
    first, second = picture(1, 40, 40), picture(2, 24, 33)
    parts = ("What is ", file_of(first), "and", file_of(second), "?")
    engine = FakeEngine(says("ok"))
    async with edge(folder, engine) as client:
        replies = [
            await client.post(CHAT, json=chat(*parts)),
            await client.post(MESSAGES, json=anthropic(*parts)),
            await client.post(RESPONSES, json=responses(*parts)),
        ]
        assert [reply.status_code for reply in replies] == [200] * 3, [reply.text for reply in replies]
        count = (await client.post(f"{MESSAGES}/count_tokens", json=anthropic(*parts))).json()["input_tokens"]
        tokens = (await client.post("/tokenize", json={"messages": chat(*parts)["messages"]})).json()["tokens"]
    calls = engine.calls
    assert len(calls) == 3 and all((c.prompt, c.inputs) == (calls[0].prompt, calls[0].inputs) for c in calls)
    prompt, inputs = calls[0].prompt, calls[0].inputs
    assert inputs is not None and len(inputs.images) == 2
    assert count == len(prompt) and tokens == list(prompt)
    assert replies[0].json()["usage"]["prompt_tokens"] == len(prompt)
    assert replies[1].json()["usage"]["input_tokens"] == len(prompt)
    of = ImagePrompts(folder)
    starts, ends = [image.start - 1 for image in inputs.images], [image.end + 1 for image in inputs.images]
    around = [list(prompt[: starts[0]]), list(prompt[ends[0] : starts[1]]), list(prompt[ends[1] :])]
    whole = [*around[0], first, *around[1], second, *around[2]]
    assert of.of(whole) == (list(prompt), inputs)
    model = make_image_model(folder, "qwen2_5_vl")
    with local_engine(EngineSpec(worker_of(folder), None)) as local:
        request = Request("a", list(prompt), calls[0].sampling, inputs=inputs)
        local.run([request], 1)
    assert request.output == of.by_transformers(model, whole, 6)


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
async def test_images_of_gemma_are_put_where_its_processor_puts_them(tmp_path: Path, kind: str) -> None:
    """And a placeholder that a user writes stays text."""
    make_image_model(tmp_path, kind)
    add_tokenizer(tmp_path, kind)
    first, second = picture(1, 40, 40), picture(2, 24, 33)
    _, _, token, shown = GEMMA[kind]
    parts, engine = ("What is ", file_of(first), shown, file_of(second), "?"), FakeEngine(says("ok"))
    async with edge(tmp_path, engine) as client:
        reply = await client.post(CHAT, json=chat(*parts))
        assert reply.status_code == 200, reply.text
        body = {"messages": chat(*parts)["messages"]}
        assert (await client.post("/tokenize", json=body)).json()["count"] == len(engine.calls[0].prompt)
    prompt, inputs = engine.calls[0].prompt, engine.calls[0].inputs
    assert inputs is not None and not inputs.positions and len(inputs.images) == 2
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    around, last = [], 0
    for image in inputs.images:
        around.append(list(prompt[last : image.start]))
        last = image.end
    around.append(list(prompt[last:]))
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in around]
    begin, end = GEMMA[kind][:2]
    blank = "\n\n" if kind == "gemma3" else ""
    assert texts == [
        f"<|im_start|>user\nWhat is {blank}{begin}",
        f"{end}{blank}{shown}{blank}{begin}",
        f"{end}{blank}?<|im_end|>\n<|im_start|>assistant\n",
    ]
    special = {tokenizer.token_to_id(begin), tokenizer.token_to_id(token)}
    assert special & set(around[1]) == {around[1][-1]}, "the user's placeholder is plain text"


async def test_a_conversation_goes_on_after_an_image(folder: Path) -> None:
    image = file_of(picture(1, 40, 40))
    turns = [*chat(image, "a")["messages"], {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    engine = FakeEngine(says("ok"))
    async with edge(folder, engine) as client:
        assert (await client.post(CHAT, json=chat(image, "a"))).status_code == 200
        assert (await client.post(CHAT, json=chat(image, "a") | {"messages": turns})).status_code == 200
    before, after = engine.calls
    assert before.inputs is not None and after.inputs is not None
    assert before.inputs.images == after.inputs.images, "the same pages"


async def test_texts_make_no_placeholder(folder: Path) -> None:
    """Also where two parts of a message meet."""
    image, engine = file_of(picture(1, 40, 40)), FakeEngine(says("ok"))
    async with edge(folder, engine) as client:
        for forged in (("<|image_pad|>", ""), ("<|image", "_pad|>")):
            reply = await client.post(CHAT, json=chat(image, *forged))
            assert reply.status_code == 200, reply.text
    for call in engine.calls:
        assert call.inputs is not None
        assert list(call.prompt).count(IMAGE_TOKEN) == call.inputs.images[0].num_rows


async def test_a_model_of_text_refuses_images() -> None:
    image = file_of(picture(1, 40, 40))
    async with in_process(FakeEngine(says("ok"))) as client:
        for route, body in ((CHAT, chat(image)), (MESSAGES, anthropic(image)), (RESPONSES, responses(image))):
            reply = await client.post(route, json=body)
            assert reply.status_code == 400 and "images are not read here" in reply.text


def bomb(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG whose header says this size."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def gif(num_frames: int) -> bytes:
    out = io.BytesIO()
    frames = [Picture.new("P", (8, 8), i % 200) for i in range(num_frames)]
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    return out.getvalue()


def hostile() -> Iterator[tuple[bytes, str]]:
    whole = file_of(picture(1, 300, 300), "JPEG")
    yield bomb(60000, 60000), "60000 x 60000 pixels are more than"
    yield bomb(5000, 5000, zlib.compress(bytes(1 << 20))), "it cannot be decoded"
    yield file_of(Picture.new("RGB", (50000, 1))), "50000 x 1 pixels: one side may be at most 200 times"
    yield whole[: len(whole) // 2], "it cannot be decoded"
    yield b"<svg xmlns='http://www.w3.org/2000/svg'/>", "it is not a PNG, JPEG, WEBP, GIF or BMP file"
    yield b"%!PS-Adobe-3.0 EPSF-3.0", "it is not a PNG"
    yield b"", "it is not a PNG"


async def test_hostile_files_are_refused_with_the_reason(folder: Path) -> None:
    engine = FakeEngine(says("ok"))
    async with edge(folder, engine) as client:
        for data, reason in hostile():
            reply = await client.post(CHAT, json=chat("see", data))
            assert reply.status_code == 400 and reason in reply.text, (reason, reply.text)
            assert reply.json()["error"]["param"] == "messages[0].content[1].image_url"
        for url, reason in (
            ("data:image/png;base64,####", "not base64"),
            ("data:image/png", "a data URL is"),
            ("https://example.com/a.png", "ingress.image_hosts"),
            ("file:///etc/passwd", "ingress.image_hosts"),
        ):
            body = chat()
            body["messages"][0]["content"] = [{"type": "image_url", "image_url": {"url": url}}]
            reply = await client.post(CHAT, json=body)
            assert reply.status_code == 400 and reason in reply.text, reply.text
        many = [file_of(picture(1, 8, 8))] * 33
        assert "33 images are more than 32" in (await client.post(CHAT, json=chat(*many))).text
        assert not engine.calls
        assert (await client.post(CHAT, json=chat(gif(300)))).status_code == 200  # its first frame
        assert (await client.post(CHAT, json=HELLO)).status_code == 200


async def test_a_file_that_takes_too_long_is_refused_and_its_process_ends(folder: Path) -> None:
    engine = FakeEngine(says("ok"))
    async with edge(folder, engine) as client:
        assert (await client.post(CHAT, json=chat(file_of(picture(1, 8, 8))))).status_code == 200
    async with edge(folder, engine, image_timeout_s=1e-3) as client:
        reply = await client.post(CHAT, json=chat(file_of(picture(1, 2000, 2000))))
        assert reply.status_code == 400 and "takes longer than 0.001 s" in reply.text
    pid = str(template("images")._process.pid)  # type: ignore[union-attr]
    children = Path(f"/proc/{pid}/task/{pid}/children")
    await until(lambda: not children.read_text().split())


async def test_a_picture_is_turned_as_its_camera_says(folder: Path) -> None:
    upright = Picture.fromarray(np.arange(24 * 40 * 3, dtype=np.uint8).reshape(24, 40, 3))
    turned = upright.transpose(Picture.Transpose.ROTATE_90)
    exif = Picture.Exif()
    exif[0x0112] = 6  # to be turned by 270 degrees
    engine = FakeEngine(says("ok"))
    async with edge(folder, engine) as client:
        for data in (file_of(upright), file_of(turned, exif=exif.tobytes())):
            assert (await client.post(CHAT, json=chat(data))).status_code == 200
    first, second = engine.calls
    assert first.inputs == second.inputs
