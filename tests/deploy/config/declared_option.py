"""The commands of `aerie` with one more key of the configuration, inserted before its module is imported. Run as a
process by `tests.deploy.config.test_declared_options`; prints what it saw as JSON."""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from tests.support.repository.changed_module import import_changed

FIELD = '    warm_pages: Annotated[int, Setting("--warm-pages --num-warm", ge=0, le=9, note="kept warm")] = 3\n'
MEANING = "    warm_pages: pages that are read ahead; 0: none.\n"
AFTER = "    state_snapshots: Annotated["


def insert() -> None:
    """Import `CacheConfig` from its source with the declaration, the only change."""
    described = "    state_snapshots: saved states"
    import_changed("aerie.attention.config", (described, MEANING + described), (AFTER, FIELD + AFTER))


def aerie(*arguments: str) -> tuple[int, str, str]:
    """Run a command; return its exit code, output and errors."""
    from aerie.deploy.cli import main

    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            code = main(list(arguments))
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, out.getvalue(), error.getvalue()


def on_command_lines(folder: Path, target: str) -> dict[str, Any]:
    import yaml

    (folder / "options.yaml").write_text("num_warm: 6\n")
    lines = (["--warm-pages", "5"], ["--num_warm=4"], ["--config", f"{folder}/options.yaml"])
    found, notes = [], []
    for number, line in enumerate(lines):
        saved = folder / f"{number}.yaml"
        code, out, error = aerie("plan", target, *line, "--nodes", "0", "--save", str(saved))
        assert code == 0, error
        notes.append("--warm-pages" in out and "cache.warm_pages" in out and "kept warm" in out)
        found.append(yaml.safe_load(saved.read_text())["applications"][0]["args"]["cache"])
    written = saved.read_text()
    (folder / "high.yaml").write_text(written.replace("warm_pages: 6", "warm_pages: 12"))
    (folder / "near.yaml").write_text(written.replace("warm_pages: 6", "warm_page: 6"))
    return {
        "args": found,
        "notes": notes,
        "from the file": aerie("plan", str(saved), "--nodes", "0")[0],
        "high": aerie("plan", str(folder / "high.yaml"), "--nodes", "0")[2],
        "near": aerie("plan", str(folder / "near.yaml"), "--nodes", "0")[2],
        "text": aerie("plan", target, "--warm-pages", "many")[2],
        "typo": aerie("plan", target, "--warm-page", "5")[2],
        "help": aerie("serve", "--help")[1],
        "keys": aerie("config", "--keys", "cache")[1],
    }


def in_python(target: str) -> dict[str, Any]:
    """Use the key in the Python interface, and follow it into the plan of a rank."""
    from aerie.cluster.placement import NodeResources
    from aerie.cluster.plan import Plan, resolve
    from aerie.deploy.offline.engine import _config

    config = _config(target, None, None, {"warm_pages": 7})
    args = resolve(config, 64, [NodeResources("n", "127.0.0.1", 4, 0)]).to_args()
    plan = Plan.from_args(json.loads(json.dumps(args)))
    return {"plan": vars(plan.replica.rank.worker.cache)["warm_pages"]}


def page() -> list[str]:
    """Return the row of docs/configuration.md."""
    from aerie.deploy.config.keys import with_tables
    from tests.support import DOCS

    return [line for line in with_tables((DOCS / "configuration.md").read_text()).splitlines() if "warm_pages" in line]


if __name__ == "__main__":
    insert()
    seen = on_command_lines(Path(sys.argv[1]), sys.argv[2])
    print(json.dumps(seen | in_python(sys.argv[2]) | {"page": page()}))
