"""/docs: Swagger UI from this server alone."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

from trtllm_lite.runtime.server.pages import DOCS, all_pages
from trtllm_lite.runtime.server.settings import ServerConfig, key_digest

Lab = Any  # of conftest.py, which cannot be imported
RunLab = Callable[..., None]

KEYED = ServerConfig(key_digests=(key_digest("k"),))
OURS = ("index.html", "page.js", "page.css")


class Page(HTMLParser):
    """What the page loads, and what stands in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.names: set[str] = set()
        self.inline: list[str] = []
        self._tag = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.names |= {name for name, _ in attrs}
        self.loaded += [value for name, value in attrs if name in ("src", "href") and value]

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""

    def handle_data(self, data: str) -> None:
        if self._tag in ("script", "style") and data.strip():
            self.inline.append(data)


def test_the_page_and_all_it_loads_come_from_here_without_a_key(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        answer = await lab.get("/docs")
        assert answer.status == 200
        page = Page(answer.body.decode())
        assert page.inline == []
        assert not {name for name in page.names if name.startswith("on") or name == "style"}
        assert len(page.loaded) == 5
        for name in page.loaded:
            # Relative to /docs, so a prefix in front is kept.
            assert re.fullmatch(r"(docs|static)/[\w.-]+", name)
            found = await lab.get(f"/{name}")
            assert found.status == 200
            assert found.headers["x-content-type-options"] == "nosniff"
            assert len(found.body) > 100

    run_lab(test, KEYED)


def test_the_policy_lets_nothing_in_from_elsewhere(run_lab: RunLab) -> None:
    async def test(lab: Lab) -> None:
        policy = (await lab.get("/docs")).headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "http" not in policy
        assert "unsafe" not in policy
        playground = (await lab.get("/")).headers["content-security-policy"]
        assert "data:" not in playground

    run_lab(test)


def test_our_files_name_no_other_host_and_styles_load_none() -> None:
    for name in OURS:
        assert "http" not in (DOCS / name).read_text(encoding="utf-8")
    for path in DOCS.glob("*.css"):
        targets = re.findall(r"url\(\s*[\"']?([^)\"']{5})", path.read_text(encoding="utf-8"))
        assert {target for target in targets if target != "data:"} == set()
        assert "@import" not in path.read_text(encoding="utf-8")


def test_the_licence_of_what_is_not_ours_lies_beside_it() -> None:
    names = {path.name for path in DOCS.iterdir()}
    assert names - set(OURS) == {
        "swagger-ui-bundle.js",
        "swagger-ui.css",
        "swagger-ui-LICENSE.txt",
        "swagger-ui-NOTICE.txt",
    }
    assert "Apache License" in (DOCS / "swagger-ui-LICENSE.txt").read_text(encoding="utf-8")


def test_pages_do_not_share_a_path() -> None:
    paths = [path for pages in all_pages() for path in pages.paths]
    assert len(paths) == len(set(paths))
    assert {"/", "/docs"} <= set(paths)
