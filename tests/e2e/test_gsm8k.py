"""The GSM8K client against the embedded pair under real Serve: speculation changes no answer."""

import json
from collections.abc import Iterator

import pytest

from tests.bench.quality import gsm8k
from tests.e2e.serving import Server, serving, wait_idle
from tests.support import MODELS

# Slow: `tests.speculative.test_losslessness` compares such answers, and `test_serving` the way to a client.
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]
NUM_QUESTIONS = 8


@pytest.fixture(scope="module")
def server(ray_port: int) -> Iterator[Server]:
    args = {
        "model": {"path": "target", "device": "cpu"},
        "speculative": {"path": "draft", "num_steps": 3, "num_draft_tokens": 4, "adaptive": False},
        "cache": {"num_pages": 1024},
        "scheduler": {"max_running": 8},
    }
    with serving(ray_port, args, MODELS) as running:
        yield running


def test_eight_shots_give_the_same_answers_with_and_without_speculation(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--num-questions", str(NUM_QUESTIONS), "--max-tokens", "96", "--parallel", "6", "--compare"]
    code = gsm8k.main(["--url", server.url, *options])
    *lines, last = capsys.readouterr().out.splitlines()
    figures = json.loads(last)
    assert code == 0, last
    assert figures["equal_share"] == 1.0 and figures["num_unequal"] == 0, figures.get("first_unequal")
    on, off = figures["on"], figures["off"]
    assert (on["accuracy"], on["invalid"]) == (off["accuracy"], off["invalid"])
    # The embedded draft was trained for such text: 3 tokens a round on GSM8K, 1 if it were not used.
    assert on["acceptance_length"] > 1.5 and off["acceptance_length"] is None
    assert on["output_tokens"] == off["output_tokens"] > NUM_QUESTIONS
    assert "Equal answers, on and off: 1.0000 (0 unequal)" in lines
    # The answers share their eight shots, of which the second one on finds most in the prefix cache.
    stats = wait_idle()
    assert stats.prefix_hits > 0.5 * stats.prefix_queries
