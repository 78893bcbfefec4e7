"""Pictures as cameras and programs write them, and parts as clients of several servers write them: the engine gets the
picture, or the refusal says what to send."""

import base64
import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Picture

from aerie.workers.prompt_inputs import Placeholder
from aerie.workers.vision.processor import ImageJob, decoded
from tests.cluster.http.requests.test_images import MESSAGES, data_url, edge
from tests.support.edge_client import CHAT, RESPONSES
from tests.support.fake_engine import FakeEngine, says
from tests.support.targets.image_models import add_tokenizer, file_of, make_image_model, picture

WIDTH, HEIGHT = 48, 32
GREY = np.tile(np.linspace(0, 255, WIDTH).astype(np.uint8), (HEIGHT, 1))
COLOURS = np.dstack([GREY, GREY[:, ::-1], np.full_like(GREY, 128)])
RGB, RED = Picture.fromarray(COLOURS), Picture.new("RGB", (WIDTH, HEIGHT), "red")


def pixels_of(data: bytes) -> np.ndarray[Any, Any]:
    """Return [height, width, 3] bytes of a file."""
    job = ImageJob(data, 1 << 20, 1 << 20, Placeholder("", "", 1, 1, 2, True), 14)
    image = decoded(job)
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


def png(values: np.ndarray[Any, Any], color_type: int, more: bytes = b"") -> bytes:
    """A PNG of 16 bits a value. more: chunks before the pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 16, color_type, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    chunks = chunk(b"IHDR", head) + more + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def wide(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return values.astype(np.uint16) * 257


ALPHA = np.full_like(GREY, 255)
# file, the pixels that are shown, and their greatest difference
FILES: dict[str, tuple[Callable[[], bytes], np.ndarray[Any, Any], int]] = {
    "RGB": (lambda: file_of(RGB), COLOURS, 0),
    "grey": (lambda: file_of(Picture.fromarray(GREY)), np.dstack([GREY] * 3), 0),
    "black and white": (lambda: file_of(Picture.fromarray(GREY > 127)), np.dstack([(GREY > 127) * 255] * 3), 0),
    "16-bit grey": (lambda: file_of(Picture.fromarray(wide(GREY))), np.dstack([GREY] * 3), 1),
    "16-bit grey, transparent": (lambda: png(wide(np.dstack([GREY, 255 - ALPHA])), 4), np.full_like(COLOURS, 255), 0),
    "16-bit colour": (lambda: png(wide(COLOURS), 2), COLOURS, 1),
    "16-bit with alpha": (lambda: png(wide(np.dstack([COLOURS, ALPHA])), 6), COLOURS, 1),
    "CMYK": (lambda: file_of(RGB.convert("CMYK"), "JPEG", quality=100, subsampling=0), COLOURS, 8),
    "palette": (lambda: file_of(RGB.convert("P", palette=Picture.Palette.ADAPTIVE)), COLOURS, 32),
    "transparent colour": (
        lambda: file_of(RED.quantize(2), transparency=RED.quantize(2).getpixel((0, 0))),
        np.full_like(COLOURS, 255),
        0,
    ),
    "several phone pictures": (
        lambda: file_of(RGB, "MPO", save_all=True, append_images=[RED], quality=100, subsampling=0),
        COLOURS,
        8,
    ),
    "progressive": (lambda: file_of(RGB, "JPEG", progressive=True, quality=100, subsampling=0), COLOURS, 8),
    "animated WebP": (
        lambda: file_of(RGB, "WEBP", lossless=True, save_all=True, append_images=[RED], duration=9),
        COLOURS,
        0,
    ),
    "animated PNG": (lambda: file_of(RGB, save_all=True, append_images=[RED], duration=9), COLOURS, 0),
    "BMP": (lambda: file_of(RGB, "BMP"), COLOURS, 0),
    "damaged profile": (
        lambda: file_of(RGB, "JPEG", icc_profile=b"x" * 99, quality=100, subsampling=0),
        COLOURS,
        8,
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_the_model_sees_what_the_file_shows(name: str) -> None:
    make, shown, difference = FILES[name]
    assert np.abs(pixels_of(make()) - shown).max() <= difference


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_pictures_are_turned_by_their_exif_in_all_formats(kind: str) -> None:
    wide_image = Picture.fromarray(np.dstack([wide(GREY).astype(np.uint8)] * 3)).resize((WIDTH, HEIGHT))
    for orientation, is_turned in ((1, False), (2, False), (3, False), (4, False), *((i, True) for i in range(5, 9))):
        exif = Picture.Exif()
        exif[0x0112] = orientation
        assert pixels_of(file_of(wide_image, kind, exif=exif.tobytes())).shape[0] == (WIDTH if is_turned else HEIGHT)


@pytest.mark.parametrize("kind", ["AVIF", "TIFF", "JPEG2000", "ICO", "PPM", "TGA"])
def test_other_formats_are_refused_with_those_that_are_read(kind: str) -> None:
    """Their decoders are large, or read files that they name."""
    out = io.BytesIO()
    try:
        RGB.save(out, kind)
    except (KeyError, OSError, ValueError):
        pytest.skip(f"PIL does not write {kind} here")
    with pytest.raises(ValueError, match="it is not a PNG, JPEG, WEBP, GIF or BMP file"):
        pixels_of(out.getvalue())


DATA = file_of(picture(1, 40, 40))
URL, BASE64 = data_url(DATA), base64.b64encode(DATA).decode()
IMAGE: dict[str, Any] = {"type": "image_url", "image_url": {"url": URL}}


def user(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4} | fields


def source(**changes: Any) -> dict[str, Any]:
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64} | changes}
    return user(block, model="tiny/model")


def response(**part: Any) -> dict[str, Any]:
    item = {"role": "user", "content": [{"type": "input_image", **part}]}
    return {"input": [item], "max_output_tokens": 4}


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ANSWERED = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [CALL]}]
# route, body, and the fields that are named as ignored
TAKEN: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "a URL alone": (CHAT, user(IMAGE | {"image_url": URL}), None),
    **{
        f"detail {each}": (CHAT, user(IMAGE | {"image_url": {"url": URL, "detail": each}}), None)
        for each in ("low", "high", "auto", "original", None)
    },
    "Responses' part": (CHAT, user({"type": "input_image", "image_url": URL}), None),
    "vLLM's uuid": (CHAT, user(IMAGE | {"uuid": "cat"}), "messages[0].content[0].uuid"),
    "an empty uuid": (CHAT, user(IMAGE | {"uuid": None}), None),
    "vLLM's sizes": (CHAT, user(IMAGE, mm_processor_kwargs={"max_pixels": 784}), "mm_processor_kwargs"),
    "LiteLLM's format": (
        CHAT,
        user(IMAGE | {"image_url": {"url": URL, "format": "image/png"}}),
        "messages[0].content[0].image_url.format",
    ),
    "a cache mark": (CHAT, user(IMAGE | {"cache_control": {}}), "messages[0].content[0].cache_control"),
    "capital letters": (CHAT, user(IMAGE | {"image_url": URL.replace("data:", "DATA:")}), None),
    "lines": (CHAT, user(IMAGE | {"image_url": URL[:99] + "\r\n" + URL[99:]}), None),
    "escapes": (CHAT, user(IMAGE | {"image_url": URL.replace("=", "%3D").replace("+", "%2B")}), None),
    "no type of content": (CHAT, user(IMAGE | {"image_url": f"data:;base64,{BASE64}"}), None),
    "a tool's result": (
        CHAT,
        user() | {"messages": [*ANSWERED, {"role": "tool", "tool_call_id": "a", "content": [IMAGE]}]},
        None,
    ),
    "Anthropic's data": (MESSAGES, source(), None),
    "another type of content": (MESSAGES, source(media_type="image/jpeg"), None),
    "Anthropic's URL": (
        MESSAGES,
        user({"type": "image", "source": {"type": "url", "url": URL}}, model="tiny/model"),
        None,
    ),
    "Responses": (RESPONSES, response(image_url=URL, detail="original", file_id=None), None),
    "a function's output": (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": "x"},
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "a",
                    "output": response(image_url=URL)["input"][0]["content"],
                },
            ],
            "max_output_tokens": 4,
        },
        None,
    ),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a uuid alone": (
        CHAT,
        user({"type": "image_url", "image_url": None, "uuid": "cat"}),
        "no images are kept by uuid; send it in image_url",
    ),
    "nothing": (CHAT, user({"type": "image_url"}), "no image is given; send it in image_url"),
    "an empty URL": (CHAT, user(IMAGE | {"image_url": {"url": ""}}), "no image is given; send it in image_url"),
    "base64 alone": (CHAT, user(IMAGE | {"image_url": BASE64}), "images come in data URLs here"),
    "a part without a type": (CHAT, user({"image_url": URL}), "an object whose type is one of: text, image_url"),
    "a file of Responses": (RESPONSES, response(file_id="f"), "no files are kept here; send the image in image_url"),
    "both": (RESPONSES, response(file_id="f", image_url=URL), "no files are kept here; send the image in image_url"),
    "a file of Anthropic's": (MESSAGES, source(type="file", file_id="f"), "input should be 'base64' or 'url'"),
    "embeddings": (CHAT, user({"type": "image_embeds", "image_embeds": "x"}), "images are parts of type image_url"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images")
    make_image_model(path, "qwen2_5_vl")
    add_tokenizer(path)
    return path


async def test_parts_of_many_clients_are_taken(folder: Path) -> None:
    engine, found = FakeEngine(says("ok")), {}
    async with edge(folder, engine) as client:
        for name, (route, body, _) in TAKEN.items():
            reply = await client.post(route, json=body)
            assert reply.status_code == 200, (name, reply.text)
            found[name] = reply.headers.get("x-aerie-ignored")
    assert found == {name: ignored for name, (_, _, ignored) in TAKEN.items()}
    assert len({str(call.inputs.images[0].data) for call in engine.calls if call.inputs}) == 1
    assert all(call.inputs is not None for call in engine.calls)


async def test_other_parts_are_refused_with_a_remedy(folder: Path) -> None:
    engine = FakeEngine(says("ok"))
    async with edge(folder, engine) as client:
        for name, (route, body, reason) in REFUSED.items():
            reply = await client.post(route, json=body)
            assert reply.status_code == 400 and reason in reply.text, (name, reply.text)
    assert not engine.calls
