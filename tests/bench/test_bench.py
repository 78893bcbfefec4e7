"""Every benchmark is listed; each part of `make bench` runs in its reduced form and says what it promises to."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from aerie.deploy.bench.figures import table
from tests.bench.__main__ import BENCHES, PARTS, main
from tests.bench.host.finding import Finding
from tests.bench.round import Setting, floor_ms
from tests.bench.served import ROOT

FINDINGS = {
    "startup": {"startup"},
    "memory": {"memory_pss"},
    "embedded": {"speculation_speedup"},
    "coordinator": {"coordinator_step_median", "coordinator_step_p99"},
    "http": {"http_events", "http_added_ttft"},
}
_SERVED = [pytest.mark.ray, pytest.mark.slow]  # each starts what tests/e2e/test_aerie_serve.py starts


def test_every_part_has_its_findings_here() -> None:
    assert set(FINDINGS) == set(PARTS)


@pytest.mark.parametrize(
    "part",
    [
        "coordinator",
        pytest.param("embedded", marks=pytest.mark.slow),
        *(pytest.param(part, marks=_SERVED) for part in ("startup", "memory", "http")),
    ],
)
def test_part_runs_and_its_last_line_has_the_fields(part: str, tmp_path: Path) -> None:
    """In a process of its own, as `make bench` runs it: Ray and torch leave traces in theirs."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", "cpu", "--quick", "--only", part],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result) == {"bench", "quick", "machine", "details"} | FINDINGS[part]
    assert {"cpu", "cores", "commit", "load_1min", "busy_cores_before"} <= set(result["machine"])
    for name in FINDINGS[part]:
        finding = result[name]
        assert set(finding) == {"value", "required", "unit", "met"}
        bound = float(finding["required"].split()[1])
        at_least = finding["required"].startswith(">=")
        assert finding["met"] == (finding["value"] >= bound if at_least else finding["value"] <= bound)
    assert result["details"][part]


def test_without_a_name_all_benchmarks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    for name, (module, purpose) in BENCHES.items():
        assert name in out and purpose in out
        assert "\ndef main(" in (ROOT / "tests" / "bench" / f"{module.replace('.', '/')}.py").read_text()


def test_unknown_benchmark_is_refused_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nothing"]) == 2
    assert "nothing: no such benchmark; there are cpu, round" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("bench", ["round", "sampling"])
def test_bench_of_rounds_can_be_tried_without_a_gpu(bench: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", bench, "--tiny", "--shapes", "chain", "--batches", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["bench"] == bench and result["commit"]
    figures = result["results"]["chain"]["2"]
    if bench == "round":
        assert figures["rounds"] == 9 and figures["ms_per_round"] > 0 and figures["full_ms"] > 0
        assert 0 < result["copy_tb_per_s"] < 1, "of this machine's memory, not of a GPU that it has not"
    else:
        assert min(kind["ms_per_round"] for kind in figures.values()) > 0


def test_floor_follows_the_rate_at_which_memory_is_copied() -> None:
    """Llama-3.1-8B's 7.5 billion numbers of a pass, 15 GB in bfloat16: 5.0 ms at an H100's 3.0 TB/s, 3.5 ms at an
    H200's 4.27 TB/s, and half of it on each of two."""
    h100, h200 = (floor_ms(Path(), "llama-3.1-8b", "plain", 1, Setting(), 1, rate) for rate in (3.0e12, 4.27e12))
    assert h100 == pytest.approx(5.03, abs=0.05) and h100 / h200 == pytest.approx(4.27 / 3.0)
    assert floor_ms(Path(), "llama-3.1-8b", "plain", 1, Setting(), 2, 3.0e12) == pytest.approx(h100 / 2)


def test_floor_counts_experts_that_somebody_chose() -> None:
    """A rank of DeepSeek-V3: 58 layers of 9 experts of 5.5 MB for one row, and nearly all 257 for 256 rows."""
    one, many = (floor_ms(Path(), "dsv3-rank", "plain", batch, Setting(), 1, 4.27e12) for batch in (1, 256))
    assert one == pytest.approx(1.35, abs=0.05)
    assert many > 58 * 250 * 5.5e6 / 4.27e12 * 1e3


def test_floor_counts_states_and_attention_of_hybrids() -> None:
    """Qwen3.5-27B: 12.0 ms of weights, 0.07 ms of states a request at an H200's copy rate."""
    one, many = (floor_ms(Path(), "qwen3.5-27b", "plain", batch, Setting(), 1, 4.27e12) for batch in (1, 32))
    assert one == pytest.approx(12.1, abs=0.15)
    assert many - one == pytest.approx(31 * (0.0707 + 0.0098), rel=0.05)
    assert floor_ms(Path(), "qwen3.5-35b-a3b", "plain", 1, Setting(), 1, 4.27e12) == pytest.approx(1.42, abs=0.05)


def test_unknown_part_is_refused_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["cpu", "--only", "nothing"])
    assert "embedded" in capsys.readouterr().err


def test_finding_is_met_at_its_bound() -> None:
    assert Finding(4000, 4000, "1/s", at_least=True).met and Finding(0.5, 0.5, "ms").met
    assert not Finding(3999, 4000, "1/s", at_least=True).met and not Finding(0.51, 0.5, "ms").met


def test_table_aligns_and_shortens() -> None:
    assert table(["a", "long"], [("x", 1234.5), ("yyy", 0.123456)]) == [
        "| a   | long  |",
        "| --- | ----- |",
        "| x   | 1234  |",
        "| yyy | 0.123 |",
    ]
