"""Two keys at a real server: one floods it with streams, and takes nothing of the other's.

python -m pytest -m slow -s tests/e2e/handles/test_tenants_served.py      # prints first tokens too
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.bench.host.tenants import FLOOD, KEYS, STEADY, Work, measure
from tests.e2e.checkpoint import make_tokenizer
from tests.e2e.handles.paced_rank import SLOWNESS, PacedEngine
from tests.e2e.serving import Server, serving
from tests.load.hostile.priority import outweighing
from tests.support.scripted import VOCABULARY
from tests.support.tiny_models import make_target

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
PROMPT = 3000  # tokens of the other key's prompts
RATIO = 1.3


@pytest.fixture(scope="module")
def server(ray_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """32 slots on a slow H200."""
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    make_tokenizer(make_target(folder / "target", vocab_size=VOCABULARY, max_position_embeddings=4096), VOCABULARY)
    args = {
        "model": {"path": "target", "device": "cpu", "max_model_len": 4096},
        "parallel": {"tensor_parallel": 1},
        "cache": {"num_pages": 8192},
        "scheduler": {"max_running": 32},
        "ingress": {"num_replicas": 1, "api_keys": KEYS},
    }
    with serving(ray_port, args, folder, engine_class=PacedEngine) as running:
        yield running


def test_a_first_token_beside_anothers_flood_is_little_later_than_alone(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """200 requests of one key hold all slots and wait. In order of arrival the other's first token takes minutes."""

    def report(line: str) -> None:
        with capsys.disabled():
            print(f"steps {SLOWNESS:g} times as long as an H200's: {line}", flush=True)

    work = Work(num_flood=200, flood_prompt=1000, flood_answer=256, num_steady=6, prompt=PROMPT, pause_s=0.3 * SLOWNESS)
    with outweighing():
        (turn,) = asyncio.run(measure(server.url, range(300, 900), work, 1, report))
    assert turn["ratio"] <= RATIO, turn


def test_keys_share_no_counts_no_cached_prefixes_and_no_names(server: Server) -> None:
    body = {"prompt": "the same prompt of both keys, long enough for several pages " * 4, "max_tokens": 4}
    cached = []
    for key in (FLOOD, STEADY, FLOOD):
        reply = httpx.post(f"{server.url}/v1/completions", json=body, headers={"x-api-key": key}, timeout=60)
        cached.append(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == cached[1] == 0 < cached[2]
    metrics = {
        key: httpx.get(f"{server.url}/metrics", headers={"x-api-key": key}, timeout=30).text for key in (FLOOD, STEADY)
    }
    assert 'key="flood"' in metrics[STEADY] and 'key="steady"' in metrics[STEADY], "an admin's key sees all"
    assert 'key="steady"' not in metrics[FLOOD]
