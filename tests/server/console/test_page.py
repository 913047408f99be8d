"""Tests the console's page in a headless Chromium."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import HAS_PLAYWRIGHT, needs_chromium, running_chromium
from console_server import ConsoleServer
from token_file import Tokens

import weft

if HAS_PLAYWRIGHT:
    from playwright import sync_api as playwright

pytestmark = needs_chromium

HOSTILE = "<img src=x onerror=window.hit=1>"
WIDTHS = (400, 900, 1600)
ROWS = "table.adapters tbody tr"


@pytest.fixture(scope="module")
def server() -> Iterator[ConsoleServer]:
    """A server with adapters "first", which has a curve, and "second", used last."""
    with ConsoleServer() as running:
        with running.client() as client:
            for name, steps in (("first", 12), ("second", 3)):
                adapter = client.create_adapter(name, rank=4)
                for i in range(steps):
                    data = [weft.Datum.next_token([1, 2, 40 - i])]
                    adapter.forward_backward(data)
                    adapter.optim_step()
                adapter.save(f"{name}-saved")
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with running_chromium() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def tab(browser: Any) -> Any:
    """The tab of most pages. A tab costs Chromium a second of one core, and another
    page in the same tab a quarter of that."""
    return browser.new_context().new_page()


@pytest.fixture
def open_page(browser: Any, tab: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages: with options in tabs of their own, and else in `tab`. Fails at the
    end if a page had an error, such as an exception or a violation of the
    Content-Security-Policy."""
    errors: list[str] = []
    own: list[Any] = []

    def note(message: Any) -> None:
        lost = message.text.startswith("Failed to load resource")
        if message.type == "error" and not lost:
            errors.append(message.text)

    def note_exception(error: Any) -> None:
        errors.append(str(error))

    def open_one(url: str, width: int = 900, **options: Any) -> Any:
        page = browser.new_page(**options) if options else tab
        if options:
            own.append(page)
        page.set_viewport_size({"width": width, "height": 800})
        page.set_default_timeout(5_000)
        page.on("console", note)
        page.on("pageerror", note_exception)
        page.goto(url)
        return page

    yield open_one
    for page in own:
        page.close()
    tab.unroute_all()
    tab.goto("about:blank")
    for event, listener in (("console", note), ("pageerror", note_exception)):
        tab.remove_listener(event, listener)
    assert not errors


def rows(page: Any) -> list[str]:
    cells = page.locator(f"{ROWS} td:first-child")
    return [str(text) for text in cells.all_inner_texts()]


def focused(page: Any) -> str:
    return str(page.evaluate("document.activeElement.dataset.id ?? ''"))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_shows_losses_and_fits_its_width(
    server: ConsoleServer, open_page: Callable[..., Any], width: int
) -> None:
    page = open_page(server.url, width)
    page.wait_for_selector("#loss path.line")
    assert rows(page) == ["first", "second"]
    assert page.inner_text("#loss-title") == "Loss of second"
    assert "second-saved" in page.inner_text("#checkpoints")
    points = page.get_attribute("#loss path.raw", "d")
    assert len(re.findall("[ML]", points)) == 3
    wider = "document.documentElement.scrollWidth > innerWidth"
    assert not page.evaluate(wider)
    outside = page.evaluate(
        "[...document.querySelectorAll('.card, .tiles > div, svg')].filter("
        "(e) => e.getBoundingClientRect().right > innerWidth).length"
    )
    assert outside == 0


def test_the_page_works_from_the_keyboard(
    server: ConsoleServer, open_page: Callable[..., Any]
) -> None:
    page = open_page(server.url)
    page.wait_for_selector("#loss path.line")
    page.keyboard.press("/")
    page.keyboard.type("FIR")
    playwright.expect(page.locator(ROWS)).to_have_count(1)
    assert rows(page) == ["first"]
    assert page.inner_text("#shown") == "1 of 2"
    page.keyboard.press("Escape")
    playwright.expect(page.locator(ROWS)).to_have_count(2)

    assert page.locator("tbody tr[tabindex='0']").count() == 1
    page.focus("tbody tr[tabindex='0']")
    page.keyboard.press("ArrowDown")
    assert focused(page) == "second"
    page.keyboard.press("ArrowUp")
    assert focused(page) == "first"
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid"
    page.keyboard.press("Enter")
    playwright.expect(page.locator("#loss-title")).to_have_text("Loss of first")
    assert page.get_attribute("tr[data-id=first]", "aria-selected") == "true"
    # A poll leaves the focus where it is.
    with page.expect_response(re.compile("/console/v1/state")):
        pass
    assert focused(page) == "first"
    page.focus("#loss")
    page.keyboard.press("End")
    # The step's targets 2 and 29 have the canned losses 3/8 and 30/8.
    playwright.expect(page.locator("#loss .readout")).to_contain_text(
        "step 23: 2.063, 2 tokens"
    )


def test_a_column_sorts_the_rows(
    server: ConsoleServer, open_page: Callable[..., Any]
) -> None:
    page = open_page(server.url)
    page.wait_for_selector("#loss path.line")
    step = page.get_by_role("button", name="Step")
    step.click()
    assert rows(page) == ["second", "first"]
    step.click()
    assert rows(page) == ["first", "second"]
    assert page.locator("th", has=step).get_attribute("aria-sort") == "descending"


def test_a_poll_that_comes_at_once_makes_no_peak(
    server: ConsoleServer, open_page: Callable[..., Any]
) -> None:
    page = open_page("about:blank")
    # The page polls again at once when it selects an adapter.
    readings = [(0.0, 0), (0.03, 1000), (2.0, 1000)]

    def answer(route: Any) -> None:
        state = server.state()
        seconds, state["tokens"]["train"] = (
            readings.pop(0) if len(readings) > 1 else readings[0]
        )
        state["now"] = 1_000_000 + seconds
        route.fulfill(json=state)

    page.route("**/console/v1/state*", answer)
    page.goto(server.url)
    rate = page.locator("#tiles dd").first
    playwright.expect(rate).to_have_text("500")
    assert page.locator("#speed circle.one").count() == 1
    assert page.locator("#speed path.one").count() == 0


def test_a_hostile_name_is_text(
    server: ConsoleServer, open_page: Callable[..., Any]
) -> None:
    page = open_page("about:blank")

    def answer(route: Any) -> None:
        """Puts markup into every text of the state."""
        state = server.state(adapter="first", checkpoints="1")
        text = json.dumps(state).replace('"first"', json.dumps(HOSTILE))
        state = json.loads(text)
        for group in ("adapters", "errors"):
            for entry in state[group]:
                entry.update(dict.fromkeys(("tenant", "rpc", "reason"), HOSTILE))
        state["tenants"] = [{"tenant": HOSTILE, "bytes": 1}]
        state["server"].update(model=HOSTILE, phase=HOSTILE, version=HOSTILE)
        state["caller"].update(token=HOSTILE)
        state["selected"].update(snapshots=[HOSTILE], targets=[HOSTILE])
        state["selected"]["num_snapshots"] = 1
        state["selected"]["checkpoints"] = [{"name": HOSTILE, "bytes": 1}]
        route.fulfill(json=state)

    page.route("**/console/v1/state*", answer)
    page.goto(server.url)
    page.wait_for_selector("#checkpoints td")
    assert HOSTILE in rows(page)
    assert HOSTILE in page.inner_text("#checkpoints")
    assert HOSTILE in page.inner_text("#tenants")
    assert page.locator("img").count() == 0
    assert page.evaluate("window.hit") is None


def test_the_browser_refuses_markup_from_a_script(
    server: ConsoleServer, browser: Any
) -> None:
    page = browser.new_page()
    page.goto(server.url)
    with pytest.raises(playwright.Error, match="TrustedHTML"):
        page.evaluate("document.body.innerHTML = '<p>x</p>'")
    page.close()


def test_a_token_opens_the_page_and_stays_in_its_tab(
    open_page: Callable[..., Any], tmp_path: Path
) -> None:
    tokens = Tokens(tmp_path / "tokens")
    owner = tokens.add("owner", "acme", "train")
    other = tokens.add("other", "birch", "read")
    with ConsoleServer(f"--auth-tokens-file={tokens.path}") as server:
        with server.client(owner) as client:
            client.create_adapter("mine", rank=4)
        page = open_page(server.url)
        page.wait_for_selector("#token-form", state="visible")
        assert not page.is_visible("#main")
        assert page.inner_text("#token-error") == ""
        page.fill("#token", "weft_guess")
        page.press("#token", "Enter")
        playwright.expect(page.locator("#token-error")).not_to_be_empty()
        # The page also takes a token with the prefix of a Tinker API key.
        page.fill("#token", f"tml-{owner}")
        page.press("#token", "Enter")
        page.wait_for_selector("tr[data-id=mine]")
        assert "owner, tenant acme" in page.inner_text("#who")
        assert not page.is_visible("#memory-card")
        page.reload()
        page.wait_for_selector("tr[data-id=mine]")
        assert page.evaluate("localStorage.length + document.cookie.length") == 0
        assert owner not in page.url and owner not in page.content()

        page.click("#forget")
        page.wait_for_selector("#token-form", state="visible")
        page.fill("#token", other)
        page.press("#token", "Enter")
        page.wait_for_selector("text=There are no adapters.")
        assert "mine" not in page.inner_text("#main")

        # Beside the form there is no badge that says how old the answers are.
        tokens.revoke("other")
        page.wait_for_selector("#token-form", state="visible", timeout=20_000)
        page.evaluate("performance.now = () => 1e6")
        page.wait_for_timeout(1_500)
        assert not page.is_visible("#phase")


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"num_restoring": 3, "num_adapters": 5}, "restoring 3 of 5"),
        (
            {"num_restoring": 3, "num_adapters": 5, "restore_seconds": 80},
            "restoring 3 of 5, about 80 s left",
        ),
        ({"silent_seconds": 95}, "engine silent for 95 s"),
        ({"phase": "draining"}, "draining"),
        ({}, "serving"),
    ],
)
def test_the_badge_says_what_the_server_does(
    server: ConsoleServer,
    open_page: Callable[..., Any],
    change: dict[str, Any],
    shown: str,
) -> None:
    page = open_page("about:blank")

    def answer(route: Any) -> None:
        state = server.state()
        for name, value in change.items():
            (state if name.startswith("num_") else state["server"])[name] = value
        for adapter in state["adapters"]:
            adapter["restoring"] = "num_restoring" in change
        route.fulfill(json=state)

    page.route("**/console/v1/state*", answer)
    page.goto(server.url)
    page.wait_for_selector(ROWS)
    playwright.expect(page.locator("#phase")).to_have_text(shown)
    restoring = page.locator("tr.restoring").count()
    assert restoring == (2 if "num_restoring" in change else 0)
    if restoring:
        assert "restoring" in page.locator("tr.restoring").first.inner_text()


def test_the_badge_says_for_how_long_no_answer_came(
    open_page: Callable[..., Any],
) -> None:
    with ConsoleServer() as server:
        page = open_page(server.url)
        page.wait_for_selector("text=There are no adapters.")
        opacity = "getComputedStyle(document.querySelector('main')).opacity"
        assert page.evaluate(opacity) == "1"
        os.kill(server.pid, signal.SIGSTOP)  # A server that hangs takes connections.
        try:
            badge = playwright.expect(page.locator("#phase"))
            badge.to_contain_text("no answer for", timeout=12_000)
            assert float(page.evaluate(opacity)) < 0.6
        finally:
            os.kill(server.pid, signal.SIGCONT)
        badge.to_have_text("serving", timeout=15_000)
        assert page.evaluate(opacity) == "1"


def test_losses_are_compared_in_one_chart(
    server: ConsoleServer, open_page: Callable[..., Any]
) -> None:
    page = open_page(server.url)
    page.wait_for_selector("#loss path.line")
    page.click("#compare")
    playwright.expect(page.locator("#loss .key")).to_have_text(["second", "first"])
    assert page.locator("#loss path.line").count() == 2
    page.focus("#loss")
    page.keyboard.press("Home")
    playwright.expect(page.locator("#loss .readout")).to_contain_text(
        "update 0: second"
    )
    page.click("#compare")
    playwright.expect(page.locator("#loss-title")).to_have_text("Loss of second")


def test_a_long_name_is_whole_at_1440_pixels(open_page: Callable[..., Any]) -> None:
    name = "experiment-2026-11-27_rank16_lr1e-4_seed3_" + "x" * 60
    with ConsoleServer() as server:
        with server.client() as client:
            client.create_adapter(name, rank=4)
        page = open_page(server.url, 1440)
        page.wait_for_selector(ROWS)
        assert rows(page) == [name]
        cut = "(e) => e.scrollWidth > e.clientWidth + 1"
        assert not page.locator(f"{ROWS} td:first-child").evaluate(cut)
        assert not page.evaluate(
            "document.querySelector('#adapters').scrollWidth >"
            " document.querySelector('#adapters').clientWidth"
        )


def test_the_page_follows_the_colour_scheme_and_a_lost_server(
    browser: Any, open_page: Callable[..., Any]
) -> None:
    server = ConsoleServer()
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    with server:
        light = open_page(server.url, color_scheme="light")
        dark = open_page(server.url, color_scheme="dark")
        dark.wait_for_selector("text=There are no adapters.")
        assert light.evaluate(paper) != dark.evaluate(paper)
        dark.context.set_offline(True)
        status = playwright.expect(dark.locator("#status"))
        status.to_contain_text("Trying again")
        dark.context.set_offline(False)
        status.to_be_empty()
