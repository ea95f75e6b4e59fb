"""The playground's files: sizes, what they may hold, and the JavaScript tests beside this file."""

import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from trtllm_lite.runtime.server.pages import all_pages

HERE = Path(__file__).parent
STATIC = HERE.parents[3] / "runtime" / "server" / "static"
MOST_BYTES = 70_000
FILE_LINES = 400
SCRIPTS = sorted(STATIC.glob("*.js"))
FIELDS = {"input", "textarea", "select"}
VOID = {"meta", "link", "input"}


class Page(HTMLParser):
    """All elements of index.html in order, each with the tags that it lies in."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], tuple[str, ...]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed((STATIC / "index.html").read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), tuple(self._open)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and data.strip():
            self.texts.append((self._open[-1], data))

    def values(self, name: str) -> list[str]:
        """Every value of an attribute."""
        return [value for _, attrs, _ in self.elements if (value := attrs.get(name)) is not None]


@pytest.fixture(scope="module")
def page() -> Page:
    return Page()


def sources() -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in SCRIPTS}


def test_the_page_is_small() -> None:
    assert sum(path.stat().st_size for path in STATIC.iterdir()) < MOST_BYTES
    longest = max(len(source.splitlines()) for source in sources().values())
    assert longest <= FILE_LINES


def test_nothing_in_the_page_is_inline(page: Page) -> None:
    """What the content security policy `default-src 'self'` would block."""
    names = {name for _, attrs, _ in page.elements for name in attrs}
    assert {name for name in names if name.startswith("on") or name == "style"} == set()
    assert [tag for tag, _, _ in page.elements if tag == "style"] == []
    assert [text for tag, text in page.texts if tag == "script"] == []


def test_everything_comes_from_this_server(page: Page) -> None:
    linked = [*page.values("src"), *page.values("href")]
    assert "/docs" in {path for each in all_pages() for path in each.paths}
    files = [name for name in linked if name != "docs" and not name.startswith("#")]
    assert files
    assert all(re.fullmatch(r"static/[\w.-]+", name) for name in files)
    missing = [name for name in files if not (STATIC / name.removeprefix("static/")).is_file()]
    assert missing == []
    styles = (STATIC / "style.css").read_text(encoding="utf-8")
    assert not re.search(r"url\(|@import", styles)
    assert {name for name, source in sources().items() if re.search(r"https?:", source)} == set()


def test_modules_import_what_is_there() -> None:
    wanted = {
        (name, target)
        for name, source in sources().items()
        for target in re.findall(r'from "\./([\w.]+)"', source)
    }
    assert {(name, target) for name, target in wanted if not (STATIC / target).is_file()} == set()
    used = {target for _, target in wanted} | {"app.js", "theme.js"}
    assert used == set(sources())


def test_text_is_never_taken_for_markup_or_code() -> None:
    unsafe = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment"
        r"|DOMParser|srcdoc|\beval\b|\bFunction\(|import\(|setAttribute\(\"(?:on|style|href|src)"
        r"|createElement\(\"(?:a|img|iframe|script|link)\""
    )
    found = {
        name: match[0] for name, source in sources().items() if (match := unsafe.search(source))
    }
    assert found == {}


def test_the_key_stays_in_the_session() -> None:
    kept = {name for name, source in sources().items() if "localStorage" in source}
    assert kept == {"theme.js"}
    assert "cookie" not in "".join(sources().values())


def test_ids_are_there_once_and_are_used(page: Page) -> None:
    ids = Counter(page.values("id"))
    assert {name for name, count in ids.items() if count > 1} == set()
    scripted = set(re.findall(r"\bat\(\"([\w-]+)\"\)", "".join(sources().values())))
    scripted |= set(re.findall(r"getElementById\(\"([\w-]+)\"\)", "".join(sources().values())))
    pointed = {name.removeprefix("#") for name in page.values("href") if name.startswith("#")}
    named = {word for each in page.values("aria-describedby") for word in each.split()}
    styled = set(re.findall(r"#([a-z-]+)", (STATIC / "style.css").read_text(encoding="utf-8")))
    assert (scripted | pointed | named | set(page.values("for"))) - set(ids) == set()
    assert set(ids) - (scripted | pointed | named | styled) == set()


def test_every_field_has_a_label(page: Page) -> None:
    labelled = set(page.values("for"))
    fields = [(attrs, inside) for tag, attrs, inside in page.elements if tag in FIELDS]
    assert len(fields) == 17
    for attrs, inside in fields:
        assert "label" in inside or attrs.get("id") in labelled, attrs


def test_the_first_link_skips_to_the_message(page: Page) -> None:
    focusable = [
        (tag, attrs.get("href"))
        for tag, attrs, inside in page.elements
        if "body" in inside and (tag in {"a", "button", "summary", *FIELDS} or "tabindex" in attrs)
    ]
    assert focusable[0] == ("a", "#prompt")
    assert "polite" in page.values("aria-live")


def node() -> str:
    found = shutil.which("node")
    if found is None:
        pytest.skip("the JavaScript of the playground is tested by node, which is not installed")
    return found


def run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, cwd=HERE)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound_javascript(script: Path) -> None:
    run(node(), "--check", str(script))


@pytest.mark.parametrize("script", sorted(HERE.glob("*.test.mjs")), ids=lambda path: path.name)
def test_the_tests_of_the_scripts_pass(script: Path) -> None:
    run(node(), "--test", str(script))
