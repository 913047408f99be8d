"""Finds sentences of comments and documents that open as a fragment.

A sentence that opens with one of the words below lacks its subject or its verb and
must be read twice: a reader of "Of the prompt." asks what, a reader of "Tokens of
the prompt." does not. A question may open with such a word: "Who may still queue?"
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

OPENINGS = ("Of", "Who", "Whose", "Likewise")
FOLDERS = (".ci", "client", "deploy", "kernels", "proto", "server", "src", "tests")
SLASH_SUFFIXES = frozenset({".h", ".cc", ".cu", ".cuh", ".proto"})
HASH_SUFFIXES = frozenset({".py", ".sh", ".cmake", ".yaml", ".yml", ".env"})
HASH_NAMES = frozenset({"CMakeLists.txt", "Dockerfile", "layers.txt", "run"})
SUFFIXES = SLASH_SUFFIXES | HASH_SUFFIXES | {".md"}

_STRING = re.compile(r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'")
_DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
_SLASH = re.compile(r"(?P<code>.*?)//+ ?(?P<text>.*)")
_HASH = re.compile(r"(?P<code>|.*?\s)#+ ?(?P<text>.*)")
# Matches the opening of a list item, a table row, a heading or a quotation.
_ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s+|\s*\|\s*|\s*#+\s+|\s*>\s+")
_FRAGMENT = re.compile(
    r"(?:^|(?<=[.?!:] )|(?<=[.?!:]\n)|(?<=\| ))(?P<word>" + "|".join(OPENINGS) + r")\b"
    r"(?P<rest>[^.?!|]*[.?!|]?)"
)


class Line(NamedTuple):
    number: int
    text: str


Block = list[Line]


def _blank_strings(line: str) -> str:
    return _STRING.sub(lambda match: '"' * len(match.group()), line)


def _comments(text: str, pattern: re.Pattern[str]) -> Iterator[Block]:
    """Yields blocks of lines that a reader takes as one comment.

    A comment after code continues in the lines below it that hold only a comment in
    the same column.
    """
    block: Block = []
    column = -1
    for number, line in enumerate(text.splitlines(), start=1):
        match = pattern.match(_blank_strings(line))
        if match is None:
            if block:
                yield block
            block = []
            continue
        comment = Line(number, line[match.start("text") :])
        alone = not match.group("code").strip()
        start = len(match.group("code"))
        if block and not (alone and start == column):
            yield block
            block = []
        column = start
        if comment.text.strip():
            block.append(comment)
        elif block:
            yield block
            block = []
    if block:
        yield block


def _paragraphs(text: str, first: int = 1) -> Iterator[Block]:
    """Yields the paragraphs, list items and table rows of running text."""
    block: Block = []
    for number, line in enumerate(text.splitlines(), start=first):
        item = _ITEM.match(line)
        if block and (item or not line.strip()):
            yield block
            block = []
        if line.strip():
            block.append(Line(number, line[item.end() :] if item else line.lstrip()))
    if block:
        yield block


def _docstrings(text: str) -> Iterator[Block]:
    for match in _DOCSTRING.finditer(text):
        first = text.count("\n", 0, match.start()) + 1
        yield from _paragraphs(match.group(1), first)


def _items(block: Block) -> Iterator[Block]:
    """Yields the list items and paragraphs of a comment."""
    rest: Block = []
    for line in block:
        item = _ITEM.match(line.text)
        if item and rest:
            yield rest
            rest = []
        text = line.text[item.end() :] if item else line.text.lstrip()
        rest.append(Line(line.number, text))
    if rest:
        yield rest


def blocks(path: Path, text: str) -> Iterator[Block]:
    """Yields the prose in a file of the project."""
    if path.suffix == ".md":
        yield from _paragraphs(text)
    elif path.suffix in SLASH_SUFFIXES:
        for block in _comments(text, _SLASH):
            yield from _items(block)
    elif path.suffix in HASH_SUFFIXES or path.name in HASH_NAMES:
        if path.suffix == ".py":
            yield from _docstrings(text)
            text = _DOCSTRING.sub(lambda match: "\n" * match.group().count("\n"), text)
        for block in _comments(text, _HASH):
            yield from _items(block)


def fragments(path: Path, text: str) -> Iterator[Line]:
    """Yields each sentence that opens as a fragment, with the line where it begins."""
    for block in blocks(path, text):
        joined = "\n".join(line.text.rstrip() for line in block)
        for match in _FRAGMENT.finditer(joined):
            if match.group("rest").endswith("?"):
                continue
            line = block[joined.count("\n", 0, match.start())]
            sentence = " ".join(match.group().rstrip("|").split())
            yield Line(line.number, sentence)


def prose_files(root: Path) -> Iterator[Path]:
    """Yields the sources and documents of the project, sorted within each folder."""
    for folder in (root, *(root / name for name in FOLDERS)):
        for path in sorted(folder.iterdir() if folder == root else folder.rglob("*")):
            if path.is_file() and (path.suffix in SUFFIXES or path.name in HASH_NAMES):
                yield path


def prose_offences(root: Path) -> list[str]:
    """Returns one `file:line: reason` for each fragment."""
    return [
        f"{path.relative_to(root)}:{line.number}: no sentence: {line.text}"
        for path in prose_files(root)
        for line in fragments(path, path.read_text("utf-8"))
    ]
