"""What `aerie plan` says of memory, for the configurations of mixtures of experts that are shipped. The checkpoints'
configurations are those as published; there are no weights."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie.deploy.cli import main
from tests.speculative.drafts.test_published_heads import flat, layer
from tests.support import MODELS, ROOT
from tests.workers.models.test_published_configs import FP8, QWEN3_30B, QWEN35_27B, QWEN35_35B, V3

QWEN3_HEAD = flat(layer(2048, 12288, 32, 4, 151936)) | {"architectures": ["LlamaForCausalLMEagle3"]}


def planned(name: str, folder: Path, models: dict[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what is printed of the shipped configuration `name` on eight GPUs. models: config.json of each folder."""
    shutil.copy(ROOT / "deploy" / f"{name}.yaml", folder)
    for model, config in models.items():
        path = folder / "models" / model
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(config))
        for file in (MODELS / "target").glob("*token*"):
            shutil.copy(file, path)
    assert main(["plan", str(folder / f"{name}.yaml"), "--cpus", "64", "--gpus", "8"]) == 0
    return capsys.readouterr().out


def line_of(printed: str, name: str) -> str:
    return next(line for line in printed.splitlines() if line.startswith(f"{name} "))


def blocks(rows: int, columns: int) -> int:
    """Bytes of a matrix in FP8 with a float32 for each 128 x 128 of the whole matrix."""
    return rows * columns + 4 * -(-rows // 128) * -(-columns // 128)


def test_deepseek_v3_fits_eight_gpus_of_141_gb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Experts, projections and the module's stay in FP8; scales are of whole matrices on every rank."""
    hidden, width = 7168, 2048

    def scales(rows: int, columns: int) -> int:
        return 4 * -(-rows // 128) * -(-columns // 128)

    mlp = 3 * hidden * width // 8 + 3 * scales(hidden, width)
    attention = (1536 + 576) * hidden + scales(1536, hidden) + scales(576, hidden)
    attention += 24576 // 8 * 1536 + scales(24576, 1536) + 16384 // 8 * hidden + scales(hidden, 16384)
    attention += 2 * 32768 // 8 * 512 + scales(32768, 512)  # is multiplied in bf16
    norms = 2 * (2 * hidden + 1536 + 512)
    experts = 257 * mlp + 2 * 256 * hidden + 4 * 256  # with the shared one, router and its bias
    dense = 3 * hidden * 18432 // 8 + 3 * scales(hidden, 18432)
    target = 61 * (attention + norms) + 58 * experts + 3 * dense + 2 * 2 * 129280 // 8 * hidden + 2 * hidden
    draft = attention + norms + experts + 2 * (2 * hidden * hidden + 3 * hidden)
    printed = planned("deepseek-v3", tmp_path, {"DeepSeek-V3": V3}, capsys)
    line = line_of(printed, "weights")
    assert line.startswith(f"weights     {target / 1e9:.2f} GB of the target and {draft / 1e9:.2f} GB of the draft on")
    assert f"KV takes {62 * 576 * 2} bytes per token of each" in line
    assert target + draft < 0.7 * 141e9
    assert line_of(printed, "rounds").startswith("rounds      plain (1 rows, up to 1 tokens), ")


def test_qwen3_30b_in_fp8_fits_a_gpu_of_48_gb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = {"Qwen3-30B-A3B-FP8": QWEN3_30B | {"quantization_config": FP8}, "qwen3_30b_moe_eagle3": QWEN3_HEAD}
    printed = planned("qwen3-30b-a3b", tmp_path, models, capsys)
    line = line_of(printed, "weights")
    expert = blocks(2 * 768, 2048) + blocks(2048, 768)
    attention = blocks(4096 + 2 * 512, 2048) + blocks(2048, 4096)
    in_bf16 = 48 * (128 * 2048 + 2 * 2048 + 2 * 128) + 2048 + 2 * 151936 * 2048
    target = 48 * (128 * expert + attention) + 2 * in_bf16
    assert line.startswith(f"weights     {target / 1e9:.2f} GB of the target and ") and target < 0.8 * 48e9
    assert f"KV takes {(48 + 1) * 2 * 4 * 128 * 2} bytes per token of each" in line
    assert "16 tokens per page, prefix cache on" in line_of(printed, "KV cache")


def test_qwen3_6_27b_runs_64_requests_on_141_gb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Attention with a gate beside q, gated delta layers, and what a request keeps of them; the module's own head."""
    hidden, keys, values = 5120, 16 * 128, 48 * 128
    mlp = 3 * hidden * 17408
    full = hidden * (2 * 24 + 2 * 4) * 256 + 24 * 256 * hidden + mlp
    delta = hidden * (2 * keys + 2 * values + 2 * 48) + 4 * (2 * keys + values) + values * hidden + mlp
    target = 2 * (16 * full + 48 * delta + 2 * 248320 * hidden)
    draft = 2 * (full + 2 * hidden * hidden + 65536 * hidden)
    printed = planned("qwen3.6-27b", tmp_path, {"Qwen3.6-27B": QWEN35_27B}, capsys)
    line = line_of(printed, "weights")
    assert line.startswith(
        f"weights     {target / 1e9:.2f} GB of the target and {draft / 1e9:.2f} GB of the draft (its "
    )
    assert "vocabulary head 65536 rows, 0.67 GB)" in line and f"KV takes {17 * 2 * 4 * 256 * 2} bytes per token" in line
    state = 48 * (48 * 128 * 128 * 4 + 3 * (2 * keys + values) * 2)
    assert f"{state / 1e6:.2f} MB each" in line_of(printed, "states")
    chunk = 2048 * (2 * (2 * keys + 3 * values) + 4 * 48) + 2 * (2048 // 64 + 2) * 48 * 128 * 128
    assert f"a prompt's longest chunk takes {chunk / 1e6:.0f} MB" in line_of(printed, "states")
    slot = float(line_of(printed, "slots").partition(" MB")[0].rpartition(" ")[2])
    assert target + draft + 64 * (slot * 1e6 + 8192 * 69632) < 0.8 * 141e9
    assert "tree of top 4, depth 4, 8 nodes verified" in line_of(printed, "draft")


def test_qwen3_6_35b_a3b_in_fp8_fits_a_gpu_of_48_gb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = [f"model.language_model.layers.{i}" for i in range(40)]
    kept = [f"{layer}.linear_attn.{part}" for layer in layers for part in ("conv1d", "in_proj_a", "in_proj_b")]
    kept += ["lm_head", "mtp.fc", *(f"{layer}.mlp.shared_expert_gate" for layer in layers)]
    quantised = QWEN35_35B | {"quantization_config": FP8 | {"modules_to_not_convert": kept}}
    printed = planned("qwen3.6-35b-a3b", tmp_path, {"Qwen3.6-35B-A3B": quantised}, capsys)
    target, draft = (float(part.rpartition(" ")[2]) for part in line_of(printed, "weights").split(" GB of the ")[:2])
    assert 35 < target < 36.5 and draft < 1.3
    assert "chain, depth 3, 4 nodes verified" in line_of(printed, "draft")


@pytest.mark.parametrize("name,model", [("gpt-oss-20b", "gpt-oss-20b"), ("gemma-4-26b-a4b", "gemma-4-26B-A4B-it")])
def test_the_heads_of_files_say_what_the_plan_says(
    name: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights and KV a token, to the digits that the head has; and the window's bytes."""
    published = json.loads((Path(__file__).parent / "published" / f"{model}.json").read_text())
    printed = planned(name, tmp_path, {model: published}, capsys)
    head = (tmp_path / f"{name}.yaml").read_text().partition("proxy_location")[0]
    weights = re.search(r"weights +([\d.]+)", head)
    kilobytes = re.search(r"a request +(\d+) KB a token", head)
    assert weights is not None and kilobytes is not None
    target = re.search(r"([\d.]+) GB of the target", line_of(printed, "weights"))
    per_token = re.search(r"KV takes (\d+) bytes per token", printed)
    assert target is not None and per_token is not None
    assert f"{float(target[1]):.1f}" == weights[1] and "served by" not in printed
    # of a request of 16,384 tokens, as its head says in GB
    per_request = re.search(r", and ([\d.]+) MB per request", printed)
    whole = re.search(r"([\d.]+) GB (?:and [\d.]+ GB )?at 16,384 tokens", head)
    assert per_request is not None and whole is not None
    assert round(int(per_token[1]) / 1000) == int(kilobytes[1])
    assert (16384 * int(per_token[1]) + 1e6 * float(per_request[1])) / 1e9 == pytest.approx(float(whole[1]), rel=0.02)


def test_small_pages_of_latent_rows_are_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = planned("deepseek-v3", tmp_path, {"DeepSeek-V3": V3}, capsys)
    assert "64 tokens per page, prefix cache on" in line_of(printed, "KV cache")
    served = tmp_path / "deepseek-v3.yaml"
    served.write_text(served.read_text().replace("page_size: 64", "page_size: 16"))
    assert main(["plan", str(served), "--cpus", "64", "--gpus", "8"]) == 0
    line = line_of(capsys.readouterr().out, "KV cache")
    assert "16 tokens per page (latent rows are read faster by pages of 64: set cache.page_size)" in line


def test_kv_in_fp8_takes_half_the_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The draft's one layer keeps 16 bits."""
    models = {"Qwen3-30B-A3B-FP8": QWEN3_30B | {"quantization_config": FP8}, "qwen3_30b_moe_eagle3": QWEN3_HEAD}
    planned("qwen3-30b-a3b", tmp_path, models, capsys)
    served = tmp_path / "qwen3-30b-a3b.yaml"
    content = yaml.safe_load(served.read_text())
    content["applications"][0]["args"].setdefault("cache", {})["dtype"] = "fp8_e4m3"
    served.write_text(yaml.safe_dump(content))
    assert main(["plan", str(served), "--cpus", "64", "--gpus", "8"]) == 0
    printed = capsys.readouterr().out
    each = 2 * 4 * 128
    assert f"KV takes {48 * each + each * 2} bytes per token of each" in line_of(printed, "weights")
    line = line_of(printed, "KV cache")
    assert f"16 tokens per page in fp8_e4m3, {(48 * each + each * 2) / 1e3:.4g} kB per token on each rank" in line
