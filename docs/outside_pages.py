"""A hook of mkdocs: pages of the repository that lie outside of docs/ join the site, links follow them, and the
configuration's keys get their tables.

Links to other files of the repository become plain text, since the site has none of them. A link to a file that does
not exist stays as it is, so that `mkdocs build --strict` fails.
"""

import posixpath
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from aerie.deploy.config.keys import with_tables  # noqa: E402 - after the path of our own packages

OUTSIDE = {  # page of the repository -> page of the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "deploy/models/README.md": "embedded-models.md",
    "tests/bench/RESULTS.md": "figures.md",
    "tests/bench/EXPERIMENTS.md": "experiments.md",
    "tests/load/RESULTS.md": "load.md",
}
_SOURCES = {uri: source for source, uri in OUTSIDE.items()}
_LIST = re.compile(r"^((?![-*|#>\s]|\d+\. ).+)\n(?=- )", re.MULTILINE)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside of docs/."""
    for source, uri in OUTSIDE.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Add the tables of keys, point links between pages of the repository to the pages of the site, and set lists apart
    from the line before them, as Python-Markdown wants and GitHub does not."""
    uri = page.file.src_uri
    folder = posixpath.dirname(_SOURCES.get(uri, f"docs/{uri}"))
    markdown = with_tables(markdown)
    return _LIST.sub(r"\1\n\n", _LINK.sub(lambda match: _followed(match, folder), markdown))


def _followed(match: re.Match[str], folder: str) -> str:
    """folder: of the repository, in which the link's page lies."""
    picture, text, target, anchor = match.groups(default="")
    path = posixpath.normpath(posixpath.join(folder, target))
    if ":" in target or not (ROOT / path).exists():
        return match.group()
    if path.startswith("docs/"):
        return f"{picture}[{text}]({path.removeprefix('docs/')}{anchor})"
    return f"[{text}]({OUTSIDE[path]}{anchor})" if path in OUTSIDE else text
