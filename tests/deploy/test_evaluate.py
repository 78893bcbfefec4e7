"""`aerie eval-draft`: its report and its prompts."""

import argparse
import json
from pathlib import Path

import pytest

from aerie.deploy.evaluate import evaluate, read_prompts, report_of, with_shape
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request
from tests.support.embedded import CHAIN, embedded_spec
from tests.support.prompts import held_out_prompts, tokenized


def test_the_report_follows_the_definition() -> None:
    requests = [Request("a", [1], SamplingParams(9)), Request("b", [1], SamplingParams(9))]
    requests[0].acceptance_histogram, requests[0].output = [2, 1, 0, 1], [1] * 9
    requests[1].acceptance_histogram, requests[1].output = [0, 0, 2, 0], [1] * 7
    report = report_of(requests, elapsed_s=2.0)
    assert report.num_rounds == 6 and report.output_tokens_per_s == 8.0
    assert report.acceptance_length == pytest.approx(1 + (1 + 3 + 4) / 6)
    assert report.per_position == pytest.approx((4 / 6, 3 / 6, 1 / 6))


def test_prompts_end_before_the_first_answer(tmp_path: Path) -> None:
    rows = [
        {"question": "q", "answer": "a"},
        {"turns": ["first", "second"], "category": "writing"},
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "u"},
                {"role": "assistant", "content": "x"},
            ]
        },
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prompts = read_prompts(str(tmp_path), limit=9)
    assert [[m["content"] for m in p] for p in prompts] == [["q"], ["first"], ["s", "u"]]


def test_a_config_without_a_draft_is_refused() -> None:
    with pytest.raises(ValueError, match="eval-draft needs a draft"):
        with_shape(embedded_spec(None), argparse.Namespace())


def test_the_embedded_draft_reaches_its_acceptance_length() -> None:
    """The figure of deploy/models/README.md on other prompts; 2.6 is what the project promises."""
    spec = with_shape(embedded_spec(CHAIN), argparse.Namespace(config="x", num_steps=3))
    prompts = tokenized(held_out_prompts(7)[:3] + held_out_prompts(7)[4:])
    report = evaluate(spec, prompts, SamplingParams(48, 0.0), concurrency=8)
    assert report.acceptance_length > 2.6
