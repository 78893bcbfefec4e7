"""Prose keeps step with the code: what docstrings, comments, configurations and documents put in backticks and looks
like one of ours (a dotted name, a file, a section's key, a class's attribute, a module on its package's map) exists."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from aerie.cluster.config import AerieConfig
from tests.support.repository.names import (
    PACKAGES,
    ROOT,
    bindings,
    classes,
    files,
    has_attribute,
    is_defined,
    is_path,
    prose,
    ticked,
)

SOURCES = sorted(name for name in files() if name.endswith((".py", ".md", ".yaml")))
MAPS = sorted(name for name in files() if name.endswith("/__init__.py") and name.split("/")[0] in PACKAGES)
ROOMS = ("kernels", "attention", "speculative", "workers", "cluster", "deploy")
MODULES = sorted(name for name in {*SOURCES} - {*MAPS} if name.endswith(".py") and name.split("/")[0] in ROOMS)

FOREIGN = (".cuh", ".cu", ".h")  # sources of libraries, which lie in folders of the same names

# `aerie:name` is a metric.
_DOTTED = re.compile(rf"(?<![\w./-])(?:(?:{'|'.join(PACKAGES)})[.:]|aerie\.)(?:[A-Za-z_]\w*[.:])*[A-Za-z_]\w*(?![\w/])")
_PATH = re.compile(rf"(?<![\w.:/-])(?:(?:{'|'.join(PACKAGES)}|docs|examples)/[\w./*-]*|[\w./*-]+\.(?:py|md|svg))(?!\w)")
_MEMBER = re.compile(r"(?<![\w.])([A-Z]\w*)\.([a-z_]\w*)")
_LISTED = re.compile(r" {0,4}([a-z][a-z0-9_]*(?:, [a-z][a-z0-9_]*)*)(?:  +|: )\S")
_TIGHT = re.compile(r"([a-z]+_[a-z0-9_]+) \S")  # a name as long as its list's column
_ACTION = re.compile(r"def (_*(?:is|has|was|can|may|needs)_\w+)\((?:[^()]|\([^()]*\))*\) -> None:")
_CALLERS = ("Used by", "Read by", "Called by", "Owned by", "Built by")
_KEY = re.compile(rf"(?<![\w./])({'|'.join(AerieConfig.model_fields)})((?:\.[a-z_]+)+)(?![\w/(])")


def _absent(name: str) -> Iterator[str]:
    for line, text in ticked(name):
        for match in _DOTTED.finditer(text):
            dotted = match.group()
            if not is_defined(dotted) and not _is_key(dotted) and not dotted.endswith((".py", ".md", ".yaml")):
                yield f"{name}:{line}: {dotted}"
        for match in _PATH.finditer(text):
            if not match.group().endswith(FOREIGN) and not is_path(match.group().rstrip(".")):
                yield f"{name}:{line}: {match.group()}"
        for match in _MEMBER.finditer(text):
            if match.group(1) in classes() and not has_attribute(*match.groups()):
                yield f"{name}:{line}: {match.group()}"
    if name.endswith(".yaml"):
        for line, text in prose(name):
            for match in _KEY.finditer(text):
                if not _is_key(match.group()):
                    yield f"{name}:{line}: {match.group()}"


def _is_key(dotted: str) -> bool:
    """Whether it is a key of the configuration, as `ingress.api_keys`."""
    section, *keys = dotted.split(".")
    field = AerieConfig.model_fields.get(section)
    if field is None or len(keys) != 1:
        return False
    kinds = [kind for kind in get_args(field.annotation) or (field.annotation,) if dataclasses.is_dataclass(kind)]
    return any(keys[0] in {f.name for f in dataclasses.fields(kind)} for kind in kinds)


def test_names_in_prose_exist() -> None:
    assert not [absent for name in SOURCES for absent in _absent(name)]


def test_links_lead_somewhere() -> None:
    """Links of a document to files of the repository, and to headings of documents."""
    lost = []
    for name in (name for name in SOURCES if name.endswith(".md")):
        for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text()):
            path, _, heading = link.partition("#")
            if ":" not in link:
                target = (ROOT / name).parent / path if path else ROOT / name
                if not target.exists() or (heading and heading not in _headings(target.read_text())):
                    lost.append(f"{name}: {link}")
    assert not lost


def test_package_maps_name_what_the_packages_have() -> None:
    """In the head of an `__init__.py`, a bare word in backticks is a folder, a module or a name of that package; one at
    the start of a line of a list (`name  what it is for`) is a folder or a module."""
    assert not [f"{name}: {word}" for name in MAPS for word in _unknown_words(name)]


def _unknown_words(name: str) -> list[str]:
    folder = name.removesuffix("__init__.py")
    inside = {path.removeprefix(folder) for path in files() if path.startswith(folder)}
    modules = {"aerie", *PACKAGES} | {part.removesuffix(".py") for path in inside for part in path.split("/")}
    names = {bound for path in inside if path.endswith(".py") for bound in bindings(folder + path)}
    words = {text.rstrip("/") for _, text in ticked(name) if re.fullmatch(r"[a-z_]+/?", text)}
    lines = [line for _, text in prose(name) for line in text.splitlines()]
    matches = [match for line in lines if (match := _LISTED.match(line) or _TIGHT.match(line))]
    listed = {word for match in matches for word in match.group(1).split(", ")}
    return sorted(words - modules - names | listed - modules)


def _headings(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_names_are_told_apart() -> None:
    """The oracle itself: what exists and what does not, of each kind."""
    assert is_defined("aerie.workers.config.SchedulerConfig.max_running") and is_defined("aerie.deploy.app:build")
    assert not is_defined("aerie.workers.config.SchedulerConfig.max_runs") and not is_defined("workers.plan")
    assert not is_defined("aerie.cluster.http.openai_api") and not is_defined("aerie.deploy.app:make")
    assert is_path("scheduler.py") and is_path("deploy/*.yaml") and is_path("tests/bench/")
    assert not is_path("openai_api.py") and not is_path("cluster/channel.py") and not is_path("docs/*.txt")
    assert has_attribute("Scheduler", "submit") and not has_attribute("Scheduler", "submits")
    assert _is_key("ingress.api_keys") and not _is_key("ingress.edge.api_keys") and not _is_key("ingress.keys")


def _slips(name: str, head: str) -> list[str]:
    """What in a module's head says that the head was written for another module, or is two heads in one."""
    dotted, stem = name.removesuffix(".py").replace("/", "."), Path(name).stem
    own = "" if stem in bindings(name) else rf"`{stem}(?:\.\w+)*`|"
    twice = [phrase for phrase in _CALLERS if len(re.findall(rf"\b{phrase}\b", head)) > 1]
    return re.findall(rf"{own}(?<![\w.])(?:aerie\.)?{dotted}(?![\w.][a-z])\b|{name}\b", head) + twice


def test_a_head_is_that_of_one_module() -> None:
    """Where modules are joined, the heads are not: two of them have two subjects, and one names its own file as if it
    were another, as `aerie.kernels.tree.tree_growth` in tree_growth.py or `tree_growth.grow`."""
    heads = {name: ast.get_docstring(ast.parse((ROOT / name).read_text())) or "" for name in MODULES}
    assert not [f"{name}: {slip}" for name, head in heads.items() for slip in _slips(name, head)]


def test_a_name_that_asks_a_question_is_not_one_of_an_action() -> None:
    """`is_late(request)` reads as a test; what records or changes something has a verb."""
    actions = [
        f"{name}: {match[1]}"
        for name in files()
        if name.endswith(".py") and name.split("/")[0] in PACKAGES
        for match in _ACTION.finditer((ROOT / name).read_text())
    ]
    assert not actions
