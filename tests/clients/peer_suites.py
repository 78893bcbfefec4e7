"""A peer's own server tests against a server that runs: which pass, which fail as expected, and which are new.

    python -m tests.clients.peer_suites --vllm FOLDER --url URL --tokenizer FOLDER [--only PART ...]
    python -m tests.clients.peer_suites --sglang FOLDER [FOLDER] --url URL --tokenizer FOLDER [--only PART ...]

FOLDER of --vllm: its source distribution of the release that `peer_expectations.toml` names, unpacked. FOLDERs of
--sglang: `sglang/test` of its unpacked wheel, whose `kits` hold most of its server tests, and `test/registered` of its
repository; `sglang_expectations.toml` names the release. Files of a folder that is not given count as absent.

Nothing of theirs is kept here: the files are copied to a temporary folder, the names of their models replaced by the
served one, and run in a process of their own, where `peer_fixture.py` or `sglang_fixture.py` stands in for their
fixture. The exit status is 1 if a test fails that is not expected to. They need openai, anthropic, requests and
pytest-asyncio (some also rapidfuzz and schemathesis), and a server with
`ingress: {output_parser: hermes, model_aliases: [claude-3-7-sonnet-latest, HuggingFaceH4/zephyr-7b-beta]}`. Tests that
assert what a capable model answers run against `tests.clients.stand_in`; without --url, only these.
"""

import argparse
import collections
import contextlib
import fnmatch
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXPECTATIONS = {"vllm": HERE / "peer_expectations.toml", "sglang": HERE / "sglang_expectations.toml"}
_MODEL_NAMES = re.compile(r'^(\w*MODEL\w*) = (?:"[^"\n]+"|os\.environ\.get\([^)\n]*\))$', re.MULTILINE)
_NAMED_MODELS = re.compile(r'"(model|model_arg)": "[\w.-]+/[\w./-]+"')
_ANY_MODEL = re.compile(r'\bmodel="[\w.-]+/[\w.-]+"')
_FOLDERS = ("entrypoints", "tool_use")

Outcomes = dict[str, tuple[str, str]]  # test -> "passed", "failed" or "skipped", and what it said


def main() -> int:
    """The command."""
    options = _options()
    peer = "vllm" if options.vllm else "sglang"
    expected = tomllib.loads(EXPECTATIONS[peer].read_text())
    patterns = expected.get("stand_in", [])
    files = [name for name in expected["files"] if any(part in name for part in options.only)]
    outcomes: Outcomes = {}
    if options.url:
        outcomes |= _outcomes(files, patterns, "server", options.url, options)
    for_stand_in = {pattern.partition("::")[0] for pattern in patterns}
    if names := [name for name in files if any(fnmatch.fnmatchcase(name, pattern) for pattern in for_stand_in)]:
        options.tokenizer = ROOT / "deploy" / "models" / "target"
        with _stand_in() as url:
            outcomes |= _outcomes(names, patterns, "stand-in", url, options)
    if options.results:
        options.results.write_text(json.dumps(outcomes, indent=1))
    return _report(outcomes, files, expected["expected"])


@contextlib.contextmanager
def _stand_in() -> Iterator[str]:
    """Run `tests.clients.stand_in`; give its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "tests.clients.stand_in", str(port)], cwd=ROOT)
    try:
        url, end_s = f"http://127.0.0.1:{port}", time.monotonic() + 120
        while time.monotonic() < end_s:
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"{url}/v1/models").raise_for_status()
                break
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(20)


def _outcomes(files: list[str], patterns: list[str], part: str, url: str, options: Any) -> Outcomes:
    """Run the tests of `files` at one URL. part: "stand-in" for those of `patterns`, "server" for all others."""
    model = httpx.get(f"{url}/v1/models", timeout=30).raise_for_status().json()["data"][0]["id"]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shutil.copy(HERE / "peer_outcomes.py", root)
        if options.vllm:
            _copy_vllm(options.vllm / "tests", root, model)
        else:
            files = _copy_sglang(options.sglang, root, files, model)
        peer = {"PEER_URL": url.rstrip("/"), "PEER_MODEL": model}
        return _run(root, files, options, peer | {"PEER_PART": part, "PEER_STAND_IN": json.dumps(patterns)})


def _options() -> Any:
    parser = argparse.ArgumentParser(prog="python -m tests.clients.peer_suites", description=__doc__.split("\n")[0])
    peer = parser.add_mutually_exclusive_group(required=True)
    peer.add_argument("--vllm", type=Path, help="folder of vLLM's source distribution")
    peer.add_argument("--sglang", type=Path, nargs="+", help="folders of SGLang's tests")
    parser.add_argument("--url", help="of the server; without it only the tests for the stand-in run")
    parser.add_argument("--tokenizer", type=Path, default=ROOT, help="folder of the served model")
    parser.add_argument("--only", nargs="+", default=[""], help="files whose path has one of these")
    parser.add_argument("--limit-s", type=int, default=60, help="of one test (default: 60)")
    parser.add_argument("--total-s", type=float, help="of all tests (default: no limit)")
    parser.add_argument("--results", type=Path, help="write every outcome to this file, as JSON")
    return parser.parse_args()


def _copy_vllm(source: Path, root: Path, model: str) -> None:
    """Their files, with our model's name and our fixture."""
    shutil.copy(HERE / "peer_fixture.py", root)
    for path in (path for part in _FOLDERS for path in (source / part).rglob("*.py")):
        copy = root / "tests" / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = _MODEL_NAMES.sub(lambda found: f"{found[1]} = {model!r}", path.read_text())
        text = _NAMED_MODELS.sub(lambda found: f'"{found[1]}": {json.dumps(model)}', text)
        copy.write_text(text)
    for folder in [root / "tests", *(each for each in (root / "tests").rglob("*") if each.is_dir())]:
        (folder / "__init__.py").touch()
    for name in ("utils.py", "conftest.py"):
        (root / "tests" / name).write_text("from peer_fixture import *  # noqa: F403\n")
    (root / "pytest.ini").write_text("[pytest]\n")


def _copy_sglang(sources: list[Path], root: Path, files: list[str], model: str) -> list[str]:
    """Their files, with our model's name and our fixture; return those that there are."""
    shutil.copy(HERE / "sglang_fixture.py", root / "peer_fixture.py")
    found = []
    for name in files:
        # releases move files between folders of `registered`
        found_files = (path for folder in sources for path in sorted(folder.rglob(Path(name).name)))
        source = next(found_files, None)
        if source is None:
            print(f"{name}: in none of the folders", file=sys.stderr)
            continue
        found.append(name)
        text = _ANY_MODEL.sub(f"model={model!r}", source.read_text())
        if source.parent.name == "kits":  # mixins, which need a class
            text = f'from peer_fixture import mixed\n\nglobals().update(mixed("sglang.test.kits.{source.stem}"))\n'
        copy = root / "tests" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text)
    (root / "pytest.ini").write_text("[pytest]\n")
    return found


def _run(root: Path, files: list[str], options: Any, peer: Mapping[str, str]) -> Outcomes:
    results = root / "results.json"
    environment = os.environ | {
        **peer,
        "PEER_TOKENIZER": str(options.tokenizer.resolve()),
        "PEER_RESULTS": str(results),
        "PEER_LIMIT_S": str(options.limit_s),
        "PEER_SOURCES": os.pathsep.join(str(folder.resolve()) for folder in options.sglang or []),
        "PYTHONPATH": os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    plugins = ["-p", "peer_outcomes", "-p", "peer_fixture", "-p", "no:cacheprovider"]
    arguments = ["-q", "--no-header", "--tb=short", "-Wignore", "--continue-on-collection-errors"]
    command = [sys.executable, "-m", "pytest", *plugins, *arguments, *(f"tests/{name}" for name in files)]
    log = root / "pytest.log"
    with log.open("w") as output:
        try:
            subprocess.run(command, cwd=root, env=environment, stdout=output, stderr=output, timeout=options.total_s)
        except subprocess.TimeoutExpired:
            print(f"not all tests ran within {options.total_s} s (--total-s)", file=sys.stderr)
    if not results.exists() and "deselected" in log.read_text():
        return {}
    if not results.exists():
        raise SystemExit(log.read_text()[-4000:])
    return {name.removeprefix("tests/"): tuple(found) for name, found in json.loads(results.read_text()).items()}


def _report(outcomes: Outcomes, files: list[str], expected: Mapping[str, Mapping[str, str]]) -> int:
    """A line per file, then what is new; the exit status."""
    news: list[str] = []
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for test, (outcome, said) in outcomes.items():
        name, _, case = test.partition("::")
        reason = _reason(expected.get(name, {}), case)
        if outcome == "failed" and reason is None:
            news.append(f"FAILED  {test}\n        {said}")
        elif outcome == "passed" and reason is not None:
            news.append(f"passes  {test}\n        was expected to fail: {reason}")
        counts[name][outcome if outcome != "failed" or reason is None else "expected to fail"] += 1
    for name in files:
        print(f"{name:70} " + ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts[name].items())))
    total = sum(counts.values(), collections.Counter())
    print("\n".join(["", *news, "", ", ".join(f"{number} {outcome}" for outcome, number in sorted(total.items()))]))
    return int(total["failed"] > 0)


def _reason(expected: Mapping[str, str], case: str) -> str | None:
    """Why a test is expected to fail: that of the first pattern it fits."""
    return next((reason for pattern, reason in expected.items() if fnmatch.fnmatchcase(case, pattern)), None)


if __name__ == "__main__":
    sys.exit(main())
