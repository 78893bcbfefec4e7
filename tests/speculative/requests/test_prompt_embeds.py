"""`prompt_embeds` of /v1/completions, from a body to the engine's answer."""

import base64
import io
import pickle
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from aerie.cluster.transport.encoding import decode, encode
from aerie.cluster.transport.messages import GenerateRequest
from aerie.speculative.build import local_engine
from aerie.workers.scheduling.plan import pack_i32
from aerie.workers.scheduling.request import Request
from tests.speculative.conftest import Pair
from tests.support.edge_client import CHAT, HELLO, TEXT, in_process
from tests.support.fake_engine import FakeEngine, says

BODY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


def saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def text_of(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def embeds(value: Any) -> str:
    return text_of(saved(value))


def rewritten(change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> str:
    """A tensor's file with changed entries."""
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved(torch.ones(2, 3)))) as given,
        zipfile.ZipFile(out, "w", compression) as archive,
    ):
        for entry in given.namelist():
            archive.writestr(entry, change(entry, given.read(entry)))
    return text_of(out.getvalue())


async def test_embeddings_over_http_give_the_tokens_answer(pair: Pair) -> None:
    weight = load_file(pair.target / "model.safetensors")["model.embed_tokens.weight"]
    prompts = pair.prompts[1:3]
    engine = FakeEngine(says("x"))
    async with in_process(engine) as client:
        given = [embeds(weight[prompt].float()) for prompt in prompts]
        reply = await client.post(TEXT, json=BODY | {"prompt_embeds": given})
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["prompt_tokens"] == sum(map(len, prompts))
    messages = [GenerateRequest("a", pack_i32(c.prompt), c.sampling, inputs=c.inputs) for c in engine.calls]
    received = [decode(encode(message)) for message in messages]
    with local_engine(pair.spec(pair.chain())) as local:
        sampling = engine.calls[0].sampling
        expected = [request.output for request in local.generate(prompts, sampling)]
        requests = []
        for i, got in enumerate(received):
            assert isinstance(got, GenerateRequest)
            requests.append(Request(f"{i}", [0] * len(prompts[i]), sampling, inputs=got.inputs))
        local.run(requests, 2)
    assert [request.output for request in requests] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
async def test_each_dtype_and_parts_of_a_tensor_are_read(dtype: torch.dtype) -> None:
    whole = torch.randn(9, 6, generator=torch.Generator().manual_seed(3)).to(dtype)
    tensor: Tensor = whole[2:7]  # saved with the whole storage
    engine = FakeEngine(says("x"))
    async with in_process(engine) as client:
        assert (await client.post(TEXT, json=BODY | {"prompt_embeds": embeds(tensor), "n": 2})).status_code == 200
    first, second = engine.calls
    assert first.inputs == second.inputs and first.inputs is not None and first.prompt == [0] * 5
    (found,) = first.inputs.embeddings
    assert np.array_equal(found.rows(), tensor.float().numpy()) and found.start == 0
    again = FakeEngine(says("x"))
    async with in_process(again) as client:
        assert (await client.post(TEXT, json=BODY | {"prompt_embeds": embeds(tensor.clone())})).status_code == 200
    assert again.calls[0].inputs == first.inputs, "found by its values"


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return eval, ("1 + 1",)


BAD: dict[str, tuple[Any, str]] = {
    "text": ("not base64!", "prompt_embeds: must be base64"),
    "bytes": (text_of(b"PK nothing"), "not a zip file"),
    "number": (5, "must be a string"),
    "empty": ([], "1 to 128 strings"),
    "one row": (embeds(torch.ones(4)), "contiguous tensor"),
    "no rows": (embeds(torch.ones(0, 4)), "shape (0, 4)"),
    "doubles": (embeds(torch.ones(2, 3, dtype=torch.float64)), "torch DoubleStorage"),
    "transposed": (embeds(torch.ones(2, 3).T), "stride (1, 3)"),
    "two tensors": (embeds([torch.ones(2, 3)] * 2), "more than a tensor"),
    "dictionary": (embeds({"a": torch.ones(2, 3)}), "more than a tensor"),
    "code": (
        rewritten(lambda name, data: pickle.dumps(Evil(), 2) if name.endswith("data.pkl") else data),
        "contiguous tensor",
    ),
    "long": (rewritten(lambda name, data: data * 99 if name.endswith("data.pkl") else data), "more than a tensor"),
    "short": (rewritten(lambda name, data: data[:-1] if name.endswith("data/0") else data), "23 bytes"),
    "big-endian": (rewritten(lambda name, data: b"big" if name.endswith("byteorder") else data), "little-endian"),
    "compressed": (rewritten(lambda name, data: data, zipfile.ZIP_DEFLATED), "compressed"),
    "huge memo": (
        rewritten(lambda name, data: b"\x80\x02Nr\xff\xff\xff\x7f." if name.endswith("data.pkl") else data),
        "NONE",
    ),
}


@pytest.mark.parametrize("name", BAD)
async def test_what_is_no_tensor_is_refused_and_runs_nothing(name: str) -> None:
    given, text = BAD[name]
    engine = FakeEngine(says("x"))
    async with in_process(engine) as client:
        reply = await client.post(TEXT, json=BODY | {"prompt_embeds": given})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"].startswith("prompt_embeds") and text in error["message"], error
    assert not engine.calls


async def test_what_needs_tokens_is_refused_beside_embeddings() -> None:
    async with in_process(FakeEngine(says("x"))) as client:
        given = {"prompt_embeds": embeds(torch.ones(2, 3))}
        for name, value in {"prompt": "a", "echo": True, "prompt_logprobs": 1, "truncate_prompt_tokens": 1}.items():
            reply = await client.post(TEXT, json=BODY | given | {name: value})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
        assert (await client.post(CHAT, json=HELLO | given)).json()["error"]["param"] == "prompt_embeds"
        assert (await client.post(TEXT, json=BODY | given | {"prompt": ""})).status_code == 200
