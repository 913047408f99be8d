"""Tests the rules that a compiler does not check: sizes, leftovers, include guards."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from sources import CODE_FOLDERS, CPP_SUFFIXES, ROOT, SUFFIXES, files

# The limits count lines that are not blank.
MAX_FILE_LINES = 600
MAX_HEADER_LINES = 250
HEADER_SUFFIXES = frozenset({".h", ".cuh"})
MAX_FUNCTION_LINES = 60
# clang-format leaves comments as they are, so nothing else wraps them.
MAX_COLUMNS = 80
# The start of a block that is not a function.
NO_FUNCTION = re.compile(
    r"\s*(namespace|class|struct|enum|union|extern|if|for|while|switch|else|do|try)\b"
)
# The words are joined from two halves, because otherwise this file would break
# the rule.
FRAGMENT = re.compile(r"\s*//+ (Of|Who|Whose|Likewise)\b")
LEFTOVER = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")


def guard_name(path: Path) -> str:
    """Returns the include guard of a header, whose path is relative to the root."""
    return "WEFT_" + re.sub(r"[^A-Za-z0-9]", "_", str(path)).upper() + "_"


def _size_offences(name: str, lines: list[str]) -> Iterator[str]:
    length = sum(1 for line in lines if line.strip())
    limit = MAX_FILE_LINES
    if Path(name).suffix in HEADER_SUFFIXES:
        limit = MAX_HEADER_LINES
    if length > limit:
        yield f"{name}:1: {length} lines that are not blank, more than {limit}"


def _function_offences(name: str, text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > MAX_FUNCTION_LINES:
            yield (
                f"{name}:{node.lineno}: {node.name} has {length} lines, more than "
                f"{MAX_FUNCTION_LINES}"
            )


def _first_line(lines: list[str], brace: int) -> int:
    """Returns the first line of the statement whose block opens in line `brace`."""
    first = brace
    while (
        first > 0
        and lines[first - 1].strip()
        and not lines[first - 1].endswith((";", "{", "}", ":"))
        and not lines[first - 1].lstrip().startswith(("//", "#"))
    ):
        first -= 1
    return first


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _cpp_function_offences(name: str, lines: list[str]) -> Iterator[str]:
    """Yields the functions that are too long. clang-format has laid out the lines, so a
    function ends at the next line that is indented no deeper than its first line."""
    for brace, line in enumerate(lines):
        if not line.endswith("{") or line.lstrip().startswith(("}", "//", "#")):
            continue
        first = _first_line(lines, brace)
        head = " ".join(lines[first : brace + 1])
        if "(" not in head or NO_FUNCTION.match(head):
            continue
        depth = _indent(lines[first])
        for end in range(brace + 1, len(lines)):
            text = lines[end].lstrip()
            if text and not text.startswith("#") and _indent(lines[end]) <= depth:
                break
        else:
            continue
        if text.startswith("}") and end - brace > MAX_FUNCTION_LINES:
            yield (
                f"{name}:{first + 1}: a function has {end - brace} lines, more than "
                f"{MAX_FUNCTION_LINES}"
            )


def _wide_comments(root: Path) -> Iterator[str]:
    for path in files(root, (*CODE_FOLDERS, "tests"), CPP_SUFFIXES):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if len(line) > MAX_COLUMNS and "//" in line.replace("://", ""):
                name = path.relative_to(root)
                yield f"{name}:{number}: a comment beyond column {MAX_COLUMNS}"


def style_offences(root: Path) -> list[str]:
    found = [*_wide_comments(root)]
    for path in files(root, CODE_FOLDERS, SUFFIXES):
        name = path.relative_to(root)
        text = path.read_text()
        lines = text.splitlines()
        found += _size_offences(str(name), lines)
        if path.suffix == ".py":
            found += _function_offences(str(name), text)
        else:
            found += _cpp_function_offences(str(name), lines)
        for number, line in enumerate(lines, start=1):
            if LEFTOVER.search(line):
                found.append(f"{name}:{number}: unfinished work: {line.strip()}")
            if FRAGMENT.match(line) and "//" not in lines[number - 2]:
                found.append(f"{name}:{number}: no sentence: {line.strip()}")
        if path.suffix in HEADER_SUFFIXES:
            guard = guard_name(name)
            code = [line for line in lines if not line.startswith("//") and line]
            if code[:2] != [f"#ifndef {guard}", f"#define {guard}"] or code[-1] != (
                f"#endif  // {guard}"
            ):
                found.append(f"{name}:1: the include guard must be {guard}")
    return found


def test_the_sources_keep_the_house_rules() -> None:
    offences = style_offences(ROOT)
    assert not offences, "\n" + "\n".join(offences)


def unnamed_tests(root: Path) -> list[str]:
    """Returns the pytest files that no entry of ctest names, so that nothing runs
    them. A folder's CMakeLists.txt leaves out `test_`, `python_` and `_test`."""
    lists = {p.parent: p.read_text() for p in root.glob("tests/*/CMakeLists.txt")}
    words = {folder: set(re.split(r"[^\w.]+", text)) for folder, text in lists.items()}
    everywhere = set().union(*words.values())
    return [
        str(path.relative_to(root))
        for pattern in ("test_*.py", "*_test.py")
        for path in sorted(root.glob(f"tests/*/{pattern}"))
        if path.name not in everywhere
        and re.sub("^(test|python)_|_test$", "", path.stem)
        not in words.get(path.parent, set())
    ]


def test_each_pytest_file_is_in_an_entry(tmp_path: Path) -> None:
    assert not unnamed_tests(ROOT)
    (tmp_path / "tests/e2e").mkdir(parents=True)
    for name in ("test_steps.py", "test_lost.py", "python_api_test.py"):
        (tmp_path / "tests/e2e" / name).touch()
    (tmp_path / "tests/e2e/CMakeLists.txt").write_text("foreach(file steps api)")
    assert unnamed_tests(tmp_path) == ["tests/e2e/test_lost.py"]


@pytest.mark.parametrize(
    ("name", "text", "offence"),
    [
        ("a.h", "#ifndef A\n#define A\n#endif  // A\n", "the include guard"),
        ("a.cc", "// TO" + "DO\n", "unfinished work"),
        ("a.cc", "int a;\n" * 601, "601 lines"),
        ("a.cc", "int F() {\n" + "  G();\n" * 60 + "}\n", "a function has 61"),
        ("a.py", "def f():\n" + "    pass\n" * 60, "f has 61"),
        ("a.cc", "int a;  // " + "a" * 70 + "\n", "a comment beyond"),
    ],
)
def test_finds_each_offence(tmp_path: Path, name: str, text: str, offence: str) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / name).write_text(text)
    (found,) = style_offences(tmp_path)
    assert found.startswith(f"src/{name}:1: {offence}")
