"""Tests the form of the pages: short cells, links that lead somewhere, and pages that
somebody can read to the end."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from sources import ROOT, files

MAX_CELL_WORDS = 25
MAX_WORDS = {"deploy/README.md": 1000, "SECURITY.md": 1200, "src/README.md": 3000}
# Pages of attacks, which name the tests that withstand them.
ATTACKS = ("tests/server/README.md", "tests/edge/README.md", "tests/e2e/README.md")
TEST_NAME = re.compile(r"`((?:[A-Z][a-z0-9]*){2,}|test_\w+|\w+_(?:test|fuzz)\.cc)`")
NO_PAGES = {".git", ".venv", "build", "node_modules"}
# A path from the root, or from the page's folder.
NAMED_PATH = re.compile(
    r"`((?:src|server|client|deploy|tests|kernels|proto)/[\w./-]+)(?::\w+)?`"
)
LINK = re.compile(r"\]\(([^)\s#]*)(#[\w-]+)?\)")


def pages(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*.md")):
        if not NO_PAGES & set(path.relative_to(root).parts):
            yield path


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yields the lines outside of fenced blocks with their numbers."""
    fenced = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, line


def anchors(text: str) -> set[str]:
    """Returns the links of the headings."""
    titles = [line.lstrip("# ") for _, line in prose(text) if line.startswith("#")]
    kept = (re.sub(r"[^\w -]", "", title.lower()) for title in titles)
    return {f"#{title.replace(' ', '-')}" for title in kept}


def page_offences(root: Path, path: Path) -> Iterator[str]:
    text, name = path.read_text("utf-8"), str(path.relative_to(root))
    most = MAX_WORDS.get(name)
    if most and len(text.split()) > most:
        yield f"{name}:1: {len(text.split())} words, more than {most}"
    for number, line in prose(text):
        cells = re.split(r"(?<!\\)\|", line) if line.startswith("|") else []
        for words in (len(cell.split()) for cell in cells):
            if words > MAX_CELL_WORDS:
                yield f"{name}:{number}: a cell of {words} words"
        for target in NAMED_PATH.findall(line):
            if not (root / target).exists() and not (path.parent / target).exists():
                yield f"{name}:{number}: {target} does not exist"
        for target, anchor in LINK.findall(line):
            if "://" in target:
                continue
            page = path.parent / target if target else path
            if not page.exists():
                yield f"{name}:{number}: {target} does not exist"
            elif anchor and anchor not in anchors(page.read_text("utf-8")):
                yield f"{name}:{number}: {target}{anchor} does not exist"


def unknown_tests(root: Path) -> list[str]:
    """Returns the tests that the pages of attacks name and that do not exist."""
    known = set()
    for path in files(root, ("tests",), frozenset({".cc", ".py"})):
        known |= {path.name, path.stem, *re.findall(r"\w+", path.read_text("utf-8"))}
    named = "".join((root / page).read_text("utf-8") for page in ATTACKS)
    return sorted(set(TEST_NAME.findall(named)) - known)


def test_the_tests_of_the_attacks_exist() -> None:
    assert unknown_tests(ROOT) == []


def test_the_pages_keep_the_house_rules() -> None:
    found = [offence for path in pages(ROOT) for offence in page_offences(ROOT, path)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("line", "offence"),
    [
        (f"| {'word ' * 26}|", "page.md:3: a cell of 26 words"),
        ("[more](gone.md)", "page.md:3: gone.md does not exist"),
        ("as `src/gone.h` says", "page.md:3: src/gone.h does not exist"),
        ("[above](#no-title)", "page.md:3: #no-title does not exist"),
        (f"| {'word ' * 25}|", None),
        ("[this](page.md), [above](#the-title), [that](https://example.org)", None),
    ],
)
def test_names_file_and_line_of_each_offence(
    tmp_path: Path, line: str, offence: str | None
) -> None:
    (tmp_path / "page.md").write_text(f"# The title\n\n{line}\n")
    found = [*page_offences(tmp_path, tmp_path / "page.md")]
    assert found == ([offence] if offence else [])
