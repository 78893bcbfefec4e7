"""The page's files: open, complete, and under a strict policy."""

import re

from aerie.cluster.http.page.files import PAGE_ROUTES
from tests.support import ROOT
from tests.support.edge_client import CHAT, HELLO, in_process
from tests.support.fake_engine import FakeEngine, says

PAGE = ROOT / "cluster" / "http" / "page"
KEY = "sesame-open"
SUFFIXES = (".html", ".css", ".js", ".svg", ".woff2")


async def test_files_are_open_and_hold_browsers_to_a_strict_policy() -> None:
    async with in_process(FakeEngine(says("x")), api_keys=(KEY,)) as client:
        assert (await client.post(CHAT, json=HELLO)).status_code == 401
        for path in PAGE_ROUTES:
            reply = await client.get(path)
            assert reply.status_code == 200, path
            policy = reply.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
            assert "data:" not in policy
            assert reply.headers["x-content-type-options"] == "nosniff"
        assert (await client.get("/")).headers["content-type"] == "text/html; charset=utf-8"
        assert (await client.get("/page/page.js")).headers["content-type"] == "text/javascript; charset=utf-8"
        font = await client.get("/page/vendor/katex/fonts/KaTeX_Main-Regular.woff2")
        assert font.headers["content-type"] == "font/woff2" and font.content.startswith(b"wOF2")
        for hidden in ("/page/files.py", "/page/vendor/katex/LICENSE", "/page/vendor/README.md"):
            assert (await client.get(hidden)).status_code == 401


async def test_a_file_that_has_not_changed_is_not_sent_again() -> None:
    async with in_process(FakeEngine(says("x"))) as client:
        first = await client.get("/page/page.js")
        tag = first.headers["etag"]
        for known in (tag, f"W/{tag}"):
            again = await client.get("/page/page.js", headers={"if-none-match": known})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
            assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
        other = await client.get("/page/page.css", headers={"if-none-match": tag})
    assert other.status_code == 200 and first.headers["cache-control"] == "no-cache"


def test_every_file_is_served_and_nothing_comes_from_elsewhere() -> None:
    files = {str(path.relative_to(PAGE)) for path in PAGE.rglob("*") if path.suffix in SUFFIXES}
    assert files == {path.removeprefix("/page/") for path in PAGE_ROUTES if path != "/"} | {"page.html"}
    for name in files:
        if not name.startswith("vendor/"):
            text = (PAGE / name).read_text().replace("http://www.w3.org/2000/svg", "")
            assert "://" not in text and "innerHTML" not in text and "style=" not in text, name


def test_libraries_are_named_with_version_and_licence() -> None:
    listed = (PAGE / "vendor" / "README.md").read_text()
    folders = [folder for folder in (PAGE / "vendor").iterdir() if folder.is_dir()]
    assert {folder.name for folder in folders} == {"marked", "katex", "highlight"}
    for folder in folders:
        assert (folder / "LICENSE").read_text().count("opyright") >= 1
        version = re.search(rf"^\| `{folder.name}` \| `[^`]+` \| ([\d.]+) \|", listed, re.MULTILINE)
        assert version is not None
        script = next(folder.glob("*.js")).read_text()
        assert version[1] in script, folder.name
    fonts = set(re.findall(r"fonts/[\w-]+\.woff2", (PAGE / "vendor/katex/katex.min.css").read_text()))
    assert fonts == {f"fonts/{path.name}" for path in (PAGE / "vendor/katex/fonts").iterdir()}
