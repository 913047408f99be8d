"""Tests that the console's curves are those of the clients: a page in a headless
Chromium beside runs of `dpo`, `grpo` and `sft`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import HAS_PLAYWRIGHT, needs_chromium, running_chromium
from conftest import Options
from fake_weftd import FakeWeftd

from weft.__main__ import main

if HAS_PLAYWRIGHT:
    from playwright import sync_api as playwright

pytestmark = needs_chromium

# A folder for screenshots of the pages, to look at.
SCREENSHOTS = os.environ.get("WEFT_SCREENSHOTS")
STEPS = "6"


@pytest.fixture
def server() -> Iterator[FakeWeftd]:
    with FakeWeftd("--console-listen=127.0.0.1:0") as running:
        yield running


@pytest.fixture
def runs(base: Options, texts: Options, play: Options, tmp_path: Path) -> Options:
    """Trains adapters by all recipes, and returns their names."""
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(
        "\n".join(
            json.dumps({"prompt": f"w{n}", "chosen": f"w{n + 1}", "rejected": "w12"})
            for n in range(1, 9)
        )
    )
    names = []
    for command, options in (
        ("sft", texts),
        ("dpo", ["--data", str(pairs)]),
        ("grpo", [*play, "--prompts", "2", "--samples", "4"]),
    ):
        names.append(f"{command}-run")
        folder = tmp_path / "run" / command
        own = ["--adapter", names[-1], "--output", str(folder), "--steps", STEPS]
        if command != "grpo":
            own += ["--eval-fraction", "0.25", "--batch", "2"]
        assert main([command, *base, *options, *own]) == 0
    return names


@pytest.fixture
def open_page(server: FakeWeftd) -> Iterator[Callable[[int], Any]]:
    with running_chromium() as browser:

        def open_one(width: int) -> Any:
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.set_default_timeout(10_000)
            page.goto(f"http://{server.http}/")
            page.wait_for_selector("#loss path.line")
            return page

        yield open_one


def choose(page: Any, name: str) -> list[str]:
    """Selects an adapter. Returns the names of its curves."""
    page.click(f"tr[data-id={name}]")
    title = page.locator("#loss-title")
    playwright.expect(title).to_contain_text(name)
    texts = page.locator("#curve option").all_text_contents()
    return [str(text) for text in texts]


def values(page: Any) -> list[float]:
    """Reads the curve's values off the page, first to last."""
    found: list[str] = []
    page.focus("#loss")
    page.keyboard.press("Home")
    while (text := page.inner_text("#loss .readout")) not in found:
        found.append(text)
        page.keyboard.press("ArrowRight")
    return [float(text.split(": ")[1].split(",")[0]) for text in found]


def is_cut(page: Any) -> bool:
    """Returns whether a part of a table or of a tile lies outside of its box."""
    return bool(
        page.evaluate(
            "[...document.querySelectorAll('#adapters, .tiles dd, .tiles > div')]"
            ".some((e) => e.scrollWidth > e.clientWidth + 1) || "
            "document.documentElement.scrollWidth > innerWidth"
        )
    )


@pytest.mark.parametrize("width", [1280, 400])
def test_the_curves_are_the_clients_own(
    width: int, runs: Options, open_page: Callable[[int], Any], tmp_path: Path
) -> None:
    page = open_page(width)
    page.evaluate(
        "document.querySelectorAll('.tiles dd.long')"
        ".forEach((e) => { e.textContent = '578 ms / 4.0 s'; })"
    )
    assert not is_cut(page)
    for name, first, others in (
        ("dpo-run", "loss", {"accuracy", "margin", "eval_loss", "surrogate"}),
        ("grpo-run", "reward", {"length", "policy_loss", "surrogate"}),
        ("sft-run", "loss", {"loss of each call", "eval_loss"}),
    ):
        curves = choose(page, name)
        assert curves[0] == first and others <= set(curves), curves
        if SCREENSHOTS:
            page.screenshot(path=Path(SCREENSHOTS, f"{name}-{width}.png"))
    for name, curve in (("dpo", "loss"), ("grpo", "reward"), ("sft", "loss")):
        choose(page, f"{name}-run")
        page.select_option("#curve", label=curve)
        titled = f"{curve.capitalize()} of {name}-run"
        playwright.expect(page.locator("#loss-title")).to_have_text(titled)
        rows = [
            json.loads(line) for line in (tmp_path / "run" / name / "log.jsonl").open()
        ]
        logged = [row[curve] for row in rows if curve in row]
        assert values(page) == pytest.approx(logged, rel=1e-3)
    # The surrogate is there, and is called so.
    choose(page, "dpo-run")
    page.select_option("#curve", label="surrogate")
    playwright.expect(page.locator("#loss-title")).to_have_text("Surrogate of dpo-run")
    assert "says nothing" in page.inner_text("#loss-note")
    page.select_option("#curve", label="loss")
    page.click("#compare")
    playwright.expect(page.locator("#loss-title")).to_have_text("Loss")
    keys = page.locator("#loss .key")
    playwright.expect(keys).to_have_text(["dpo-run", "sft-run"])
    assert "Without loss: grpo-run" in page.inner_text("#loss-note")
    if SCREENSHOTS:
        page.screenshot(path=Path(SCREENSHOTS, f"compare-{width}.png"))
