"""The playground in a real browser, on a live server."""

from typing import Any

import httpx
import pytest

Page = Any  # of conftest.py, which cannot be imported
MakeSite = Any

TURN = ".turn:last-child"
NOT_LOADING = "document.getElementById('model').options.length > 0"


def visit(page: Page, url: str) -> None:
    page.open(url)
    page.until(NOT_LOADING)


def set_parameters(page: Page, **values: object) -> None:
    for name, value in values.items():
        page.fill(f"[name={name}]", str(value))


def answer_of(url: str, **fields: Any) -> str:
    """What the server says without the page."""
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, **fields}
    made = httpx.post(f"{url}v1/chat/completions", json=body, timeout=60).json()
    content: str = made["choices"][0]["message"]["content"]
    return content


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}metrics", timeout=60).text.splitlines()
    found = [line for line in lines if line.startswith(f"trtllm_lite_{name}")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def test_a_reply_streams_with_its_figures(page: Page, site: MakeSite) -> None:
    live = site(is_open=False)
    visit(page, live.url)
    assert page.text("#badge") == "Parity passed"
    page.until("document.getElementById('slots').textContent === '0 / 3'")
    assert page.text("#kv-tokens") == "0 / 192"
    set_parameters(page, max_tokens=9, temperature=0)
    page.ask("hello")
    page.until("/waiting for the first token/.test(document.querySelector('.figures').textContent)")
    live.sessions[0].permits.release(2)
    page.until("/TTFT/.test(document.querySelector('.figures').textContent)")
    live.sessions[0].permits.release(1_000)
    page.answered()
    figures = page.text(f"{TURN} .figures")
    for part in ("TTFT ", "TPOT ", "tokens/s", " tokens", "prompt 5"):
        assert part in figures
    # As tokens, which show the text as it is; elsewhere it is read as markup.
    page.js("document.getElementById('want-tokens').click()")
    page.js("document.querySelector('.turn:last-child .regenerate').click()")
    page.answered()
    shown = page.js(f"document.querySelector('{TURN} .tokens').textContent")
    assert shown == answer_of(live.url, max_tokens=9, temperature=0)
    assert page.js("document.querySelectorAll('.turn').length") == 1


def test_the_mouse_and_the_keys_show_rivals_of_a_token(page: Page, site: MakeSite) -> None:
    visit(page, site().url)
    set_parameters(page, max_tokens=6, temperature=0)
    page.js("document.getElementById('want-tokens').click()")
    page.ask("hello")
    page.answered()
    page.point(f"{TURN} .tokens span:nth-child(2)")
    page.until("!document.getElementById('card').hidden")
    assert page.js("document.querySelectorAll('#card tr').length") == 5
    assert page.js("document.querySelectorAll('#card .chosen').length") == 1
    page.point("#theme")
    page.until("document.getElementById('card').hidden")
    page.js(f"document.querySelector('{TURN} .tokens').focus()")
    page.press("ArrowRight")
    page.until("!document.getElementById('card').hidden")
    assert page.js(f"document.querySelectorAll('{TURN} .tokens .active').length") == 1


def test_escape_stops_a_reply_and_the_server_hears_of_it(page: Page, site: MakeSite) -> None:
    live = site(is_open=False)
    visit(page, live.url)
    live.sessions[0].permits.release(4)
    set_parameters(page, max_tokens=40, temperature=0)
    page.ask("hello")
    page.until(f"/TTFT/.test(document.querySelector('{TURN} .figures').textContent)")
    page.until("document.getElementById('running').textContent === '1'")
    page.press("Escape")
    page.answered()
    assert page.js(f"document.querySelector('{TURN}').dataset.state") == "stopped"
    live.sessions[0].permits.release(1_000)
    page.until("document.getElementById('running').textContent === '0'")
    assert metric(live.url, "requests_aborted_total") == 1


def test_the_page_shows_how_far_loading_is_and_goes_on_by_itself(
    page: Page, site: MakeSite
) -> None:
    live = site(loaded=False)
    page.open(live.url)
    page.until("document.querySelector('#notice progress')?.value === 40")
    assert "Loading: pack 40%" in " ".join(page.text("#notice").split())
    page.ask("hello")
    assert page.js("document.querySelectorAll('.turn').length") == 0
    live.may_load.set()
    page.until(NOT_LOADING)
    assert page.js("document.getElementById('notice').hidden")
    page.press("Enter")
    page.answered()
    assert page.js(f"document.querySelector('{TURN}').dataset.state") == "done"


def test_the_chosen_model_answers(page: Page, site: MakeSite) -> None:
    live = site("one", "two")
    visit(page, live.url)
    first, second = live.sessions
    page.fill("#model", "two")
    page.ask("hello")
    page.answered()
    assert (first.entered.is_set(), second.entered.is_set()) == (False, True)


def test_a_reply_keeps_to_the_form_that_was_asked_for(page: Page, site: MakeSite) -> None:
    visit(page, site().url)
    set_parameters(page, max_tokens=20, form="json_schema", form_text="{")
    page.ask("hello")
    assert page.js("document.querySelectorAll('.turn').length") == 0
    set_parameters(page, form="choice", form_text="yes\nno")
    page.ask("hello")
    page.answered()
    assert page.text(f"{TURN} .model > .text") in ("yes", "no")
    assert page.js("document.getElementById('form-box').hidden") is False
    set_parameters(page, form="text")
    assert page.js("document.getElementById('form-box').hidden")


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_needs_no_sideways_scrolling(page: Page, site: MakeSite, dark: bool) -> None:
    page.look(360, 720, dark=dark)
    visit(page, site().url)
    set_parameters(page, max_tokens=40, temperature=0)
    page.ask("hello" * 8)
    page.answered()
    assert page.js("document.documentElement.scrollWidth") <= 360
    assert page.js("document.getElementById('settings').open") is False
    ground = page.js("getComputedStyle(document.documentElement).backgroundColor")
    assert ground == ("rgb(21, 23, 26)" if dark else "rgb(252, 252, 251)")
